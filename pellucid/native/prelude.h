// The vocabulary of generated kernels: every operator of `ir/ops.py` as a function `pv::NAME`, for scalars and for
// vectors of a fixed number of lanes.
//
// A `Vec<T, W>` is W lanes of T in as few registers as they need: on AVX-512 a `Vec<float, 16>` is one register, a
// `Vec<double, 16>` two, a `Vec<int8_t, 16>` a quarter of one. All values of a kernel have the same W, so lanes of
// different types line up and no operator ever sees a register boundary; W = 64 means four registers of floats, which
// is how a loop is unrolled. A `Vec<bool, W>` is a mask.
//
// Registers are the vector types of GCC and Clang, which have operators, conversions and shuffles for every lane type;
// intrinsics are used where these are not enough. The headers below are precompiled with this file as one text, and
// stored with the kernels; each relies on those before it. Headers that are slow to compile (<cmath>, <array>,
// <sleef.h>) are not included: the first kernel on a machine waits for this one.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#define PV_INLINE __attribute__((always_inline))
#define PV_FN PV_INLINE inline
#define PV_SHARED __attribute__((noinline, visibility("hidden")))  // see kernel/shared.h

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "Pellucid's kernels need AVX2, FMA and F16C"
#endif

namespace pv {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class T> constexpr bool is_float = std::is_floating_point_v<T>;
template <class T> constexpr T inf = std::numeric_limits<T>::infinity();
template <class T> constexpr T nan = std::numeric_limits<T>::quiet_NaN();

// Prevents the vectorisation of a loop with a scalar sum of type T. GCC 12 miscompiles ordered sums of floats whose
// terms are stored in another order (backwards, permuted by a remainder).
template <class T> PV_FN void in_order() { if constexpr (is_float<T>) asm(""); }

// Integers wrap around: arithmetic is done on the unsigned type, at least as wide as int so that nothing promotes.
template <class T> using Wrap = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;

}  // namespace pv

#include "sizes.h"
#include "kernel/registers.h"
#include "kernel/masks.h"
#include "kernel/lanes.h"
#include "kernel/access.h"
#include "kernel/convert.h"
#include "kernel/scalar.h"
#include "kernel/vector.h"
#include "kernel/loops.h"
#include "kernel/reductions.h"
#include "kernel/units.h"
#include "kernel/amx.h"
#include "kernel/micro.h"
#include "kernel/contract.h"
#include "kernel/chosen.h"
#include "kernel/window.h"
#include "kernel/image_copy.h"
#include "kernel/convolve.h"
#include "kernel/spread.h"
#include "kernel/channels.h"
#include "kernel/winograd.h"
#include "kernel/groups.h"
#include "kernel/tap_gradients.h"
#include "kernel/shown.h"
#include "kernel/attend.h"
#include "kernel/attend_backward.h"
#include "kernel/shared.h"
