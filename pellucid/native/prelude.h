// The vocabulary of generated kernels: every operator of `ir/ops.py` as a function `pv::NAME`, for scalars and for
// vectors of a fixed number of lanes.
//
// A `Vec<T, W>` is W lanes of T in as few registers as they need: on AVX-512 a `Vec<float, 16>` is one register, a
// `Vec<double, 16>` two, a `Vec<int8_t, 16>` a quarter of one. All values of a kernel have the same W, so lanes of
// different types line up and no operator ever sees a register boundary; W = 64 means four registers of floats, which
// is how a loop is unrolled. A `Vec<bool, W>` is a mask.
//
// Registers are the vector types of GCC and Clang, which have operators, conversions and shuffles for every lane type;
// intrinsics stand where these have no word. The file is one, because a single header is precompiled and kept with
// the kernels. Its parts: registers, lanes, memory, conversion, scalar operators, vector operators, index checks,
// loops, reductions.
#pragma once

#include <immintrin.h>
#include <sleef.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#define PV_INLINE __attribute__((always_inline))
#define PV_FN PV_INLINE inline

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "Pellucid's kernels need AVX2, FMA and F16C"
#endif

namespace pv {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class T> constexpr bool is_float = std::is_floating_point_v<T>;
template <class T> constexpr T inf = std::numeric_limits<T>::infinity();
template <class T> constexpr T nan = std::numeric_limits<T>::quiet_NaN();

// Integers wrap around: arithmetic is done on the unsigned type, at least as wide as int so that nothing promotes.
template <class T> using Wrap = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;

// ------------------------------------------------------------------------------------------------ registers

#ifdef __AVX512F__
constexpr int REGISTER = 64;
#define PV_PS(name) _mm512_##name##_ps
#define PV_PD(name) _mm512_##name##_pd
#define PV_SLEEF_F(name) Sleef_##name##f16
#define PV_SLEEF_D(name) Sleef_##name##d8
#define PV_SLEEF_FU(name, ulp) Sleef_##name##f16_##ulp
#define PV_SLEEF_DU(name, ulp) Sleef_##name##d8_##ulp
#else
constexpr int REGISTER = 32;
#define PV_PS(name) _mm256_##name##_ps
#define PV_PD(name) _mm256_##name##_pd
#define PV_SLEEF_F(name) Sleef_##name##f8
#define PV_SLEEF_D(name) Sleef_##name##d4
#define PV_SLEEF_FU(name, ulp) Sleef_##name##f8_##ulp
#define PV_SLEEF_DU(name, ulp) Sleef_##name##d4_##ulp
#endif

// L lanes of T in one register.
template <class T, int L> struct RegisterOf {
  typedef T type __attribute__((vector_size(L * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(L * sizeof(T)), aligned(1), may_alias));
};
template <class T, int L> using Reg = typename RegisterOf<T, L>::type;

template <class T, int W> struct Vec {
  static constexpr int lanes = W * int(sizeof(T)) < REGISTER ? W : REGISTER / int(sizeof(T));  // in one register
  static constexpr int count = W / lanes;                                                      // of registers
  using reg = Reg<T, lanes>;
  reg r[count];
};

template <class V> struct LaneOf { using type = V; };
template <class T, int W> struct LaneOf<Vec<T, W>> { using type = T; };
template <class V> using Lane = typename LaneOf<V>::type;

// Calls f(K) for K = 0 .. N-1 with compile-time K and builds `Out{f(0), f(1), ...}`. Subscripts that are constants
// from the start keep the registers of a Vec in registers.
template <class Out, int N, class F> PV_FN Out build(F f) {
  return [&]<size_t... K>(std::index_sequence<K...>) PV_INLINE {
    return Out{{f(std::integral_constant<int, int(K)>())...}};
  }(std::make_index_sequence<N>());
}

// f on each register of vectors of one lane type.
template <class To, class F, class T, int W, class... More>
PV_FN Vec<To, W> map(F f, const Vec<T, W>& a, const More&... more) {
  return build<Vec<To, W>, Vec<To, W>::count>([&](auto K) PV_INLINE { return f(a.r[K], more.r[K]...); });
}

// Lanes [FROM, FROM + N) of one register.
template <int FROM, int N, class T, int L> PV_FN Reg<T, N> piece(const Reg<T, L>& a) {
  if constexpr (N == L) {
    return a;
  } else {
    return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
      return __builtin_shufflevector(a, a, (FROM + K)...);
    }(std::make_integer_sequence<int, N>());
  }
}

template <class T, int L> PV_FN Reg<T, 2 * L> join(const Reg<T, L>& a, const Reg<T, L>& b) {
  return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
    return __builtin_shufflevector(a, b, K...);
  }(std::make_integer_sequence<int, 2 * L>());
}

// N lanes of To, from lane FROM on, converted by `f` in the largest groups that are one register on both sides.
template <class To, int FROM, int N, int STEP, class From, int W, class F>
PV_FN Reg<To, N> converted(const Vec<From, W>& a, F f) {
  constexpr int in = Vec<From, W>::lanes;
  if constexpr (N == STEP) {
    return f(piece<FROM % in, STEP, From, in>(a.r[FROM / in]));
  } else {
    return join<To, N / 2>(converted<To, FROM, N / 2, STEP>(a, f), converted<To, FROM + N / 2, N / 2, STEP>(a, f));
  }
}
template <class To, class From, int W, class F> PV_FN Vec<To, W> convert(const Vec<From, W>& a, F f) {
  constexpr int in = Vec<From, W>::lanes, out = Vec<To, W>::lanes, step = in < out ? in : out;
  return build<Vec<To, W>, Vec<To, W>::count>([&](auto K) PV_INLINE {
    return converted<To, decltype(K)::value * out, out, step>(a, f);
  });
}
template <class To, class From, int W> PV_FN Vec<To, W> convert(const Vec<From, W>& a) {
  constexpr int in = Vec<From, W>::lanes, out = Vec<To, W>::lanes, step = in < out ? in : out;
  return convert<To>(a, [](auto x) PV_INLINE { return __builtin_convertvector(x, Reg<To, step>); });
}

// The same bits as lanes of another type of the same size.
template <class To, class From, int W> PV_FN Vec<To, W> as(const Vec<From, W>& a) {
  return build<Vec<To, W>, Vec<To, W>::count>([&](auto K) PV_INLINE { return (typename Vec<To, W>::reg)a.r[K]; });
}

#ifdef __AVX512F__

// A mask is one bit per lane, in groups of 16 lanes so that 32-bit lanes need no shifting.
template <int W> struct Vec<bool, W> {
  static constexpr int count = W / 16;
  using reg = uint16_t;
  reg r[count];
};

// Any register as a full one; what is above it is undefined.
template <class R> PV_FN __m512i full(R a) {
  if constexpr (sizeof(R) == 64) return (__m512i)a;
  else if constexpr (sizeof(R) == 32) return _mm512_castsi256_si512((__m256i)a);
  else if constexpr (sizeof(R) == 16) return _mm512_castsi128_si512((__m128i)a);
  else { __m128i low = {}; std::memcpy(&low, &a, sizeof(R)); return _mm512_castsi128_si512(low); }
}
template <class R> PV_FN R narrow(__m512i a) {
  if constexpr (sizeof(R) == 64) return (R)a;
  else if constexpr (sizeof(R) == 32) return (R)_mm512_castsi512_si256(a);
  else if constexpr (sizeof(R) == 16) return (R)_mm512_castsi512_si128(a);
  else { R low; __m128i all = _mm512_castsi512_si128(a); std::memcpy(&low, &all, sizeof(R)); return low; }
}

// Masks are joined by instructions that look at the used bits alone, not by shifts: GCC 12 spills a mask of 8 bits as a
// byte and reads it back as 16 where it believes the rest to be zero.
PV_FN uint16_t join_masks(uint8_t low, uint8_t high) { return _mm512_kunpackb(high, low); }
PV_FN uint32_t join_masks(uint16_t low, uint16_t high) { return _mm512_kunpackw(high, low); }
PV_FN uint64_t join_masks(uint32_t low, uint32_t high) { return _mm512_kunpackd(high, low); }

// The L bits for register K of a vector with L lanes per register, and back.
template <int K, int L, int W> PV_FN uint64_t bits_of(const Vec<bool, W>& m) {
  if constexpr (L == 64) {
    return join_masks(join_masks(m.r[4 * K], m.r[4 * K + 1]), join_masks(m.r[4 * K + 2], m.r[4 * K + 3]));
  } else if constexpr (L == 32) {
    return join_masks(m.r[2 * K], m.r[2 * K + 1]);
  } else {
    return (m.r[K * L / 16] >> (K * L % 16)) & ((1u << L) - 1);
  }
}
template <int L, int W, class F> PV_FN Vec<bool, W> from_bits(F bits) {
  return build<Vec<bool, W>, Vec<bool, W>::count>([&](auto G) PV_INLINE {
    constexpr int g = decltype(G)::value;
    if constexpr (L >= 16) {
      return uint16_t(bits(std::integral_constant<int, g * 16 / L>()) >> (g * 16 % L));
    } else {
      static_assert(L == 8);
      return join_masks(uint8_t(bits(std::integral_constant<int, 2 * g>())),
                        uint8_t(bits(std::integral_constant<int, 2 * g + 1>())));
    }
  });
}

enum Predicate { EQ = 0, LT = 1, LE = 2, NE = 4, NOT_LE = 6 };

template <Predicate P, class T> PV_FN uint64_t compare_integers(__m512i a, __m512i b) {
  if constexpr (std::is_signed_v<T>) {
    if constexpr (sizeof(T) == 8) return _mm512_cmp_epi64_mask(a, b, P);
    else if constexpr (sizeof(T) == 4) return _mm512_cmp_epi32_mask(a, b, P);
    else if constexpr (sizeof(T) == 2) return _mm512_cmp_epi16_mask(a, b, P);
    else return _mm512_cmp_epi8_mask(a, b, P);
  } else {
    if constexpr (sizeof(T) == 8) return _mm512_cmp_epu64_mask(a, b, P);
    else if constexpr (sizeof(T) == 4) return _mm512_cmp_epu32_mask(a, b, P);
    else if constexpr (sizeof(T) == 2) return _mm512_cmp_epu16_mask(a, b, P);
    else return _mm512_cmp_epu8_mask(a, b, P);
  }
}

template <Predicate P, class T, int W> PV_FN Vec<bool, W> compare(const Vec<T, W>& a, const Vec<T, W>& b) {
  using V = Vec<T, W>;
  return from_bits<V::lanes, W>([&](auto K) PV_INLINE -> uint64_t {
    constexpr int k = decltype(K)::value;
    constexpr int quiet = P == LT ? _CMP_LT_OQ : P == LE ? _CMP_LE_OQ : P == NE ? _CMP_NEQ_UQ
                          : P == NOT_LE ? _CMP_NLE_UQ : _CMP_EQ_OQ;
    constexpr uint64_t used = V::lanes == 64 ? ~0ull : (1ull << (V::lanes % 64)) - 1;
    if constexpr (std::is_same_v<T, float>) return _mm512_cmp_ps_mask((__m512)a.r[k], (__m512)b.r[k], quiet);
    else if constexpr (std::is_same_v<T, double>) return _mm512_cmp_pd_mask((__m512d)a.r[k], (__m512d)b.r[k], quiet);
    else return compare_integers<P, T>(full(a.r[k]), full(b.r[k])) & used;
  });
}

template <class T, int W>
PV_FN Vec<T, W> where(const Vec<bool, W>& m, const Vec<T, W>& a, const Vec<T, W>& b) {
  using V = Vec<T, W>;
  if constexpr (std::is_same_v<T, bool>) {
    return build<V, V::count>([&](auto K) PV_INLINE { return uint16_t((m.r[K] & a.r[K]) | (~m.r[K] & b.r[K])); });
  } else {
    return build<V, V::count>([&](auto K) PV_INLINE {
      constexpr int k = decltype(K)::value;
      const uint64_t bits = bits_of<k, V::lanes>(m);
      using R = typename V::reg;
      if constexpr (std::is_same_v<T, float>) return (R)_mm512_mask_blend_ps(bits, (__m512)b.r[k], (__m512)a.r[k]);
      else if constexpr (std::is_same_v<T, double>) return (R)_mm512_mask_blend_pd(bits, (__m512d)b.r[k], (__m512d)a.r[k]);
      else if constexpr (sizeof(T) == 8) return narrow<R>(_mm512_mask_blend_epi64(bits, full(b.r[k]), full(a.r[k])));
      else if constexpr (sizeof(T) == 4) return narrow<R>(_mm512_mask_blend_epi32(bits, full(b.r[k]), full(a.r[k])));
      else if constexpr (sizeof(T) == 2) return narrow<R>(_mm512_mask_blend_epi16(bits, full(b.r[k]), full(a.r[k])));
      else return narrow<R>(_mm512_mask_blend_epi8(bits, full(b.r[k]), full(a.r[k])));
    });
  }
}

template <int W> PV_FN bool any(const Vec<bool, W>& m) {
  uint16_t all = 0;
  for (int g = 0; g < Vec<bool, W>::count; g++) all |= m.r[g];
  return all != 0;
}

// Lanes [0, n) of W.
template <int W> PV_FN Vec<bool, W> first_lanes(int64_t n) {
  const uint64_t bits = _bzhi_u64(~0ull, uint32_t(n));
  return from_bits<64, W>([&](auto) PV_INLINE { return bits; });
}

template <class T, int W> PV_FN Vec<T, W> load_masked(const T* p, const Vec<bool, W>& m) {
  using V = Vec<T, W>;
  return build<V, V::count>([&](auto K) PV_INLINE {
    constexpr int k = decltype(K)::value;
    const uint64_t bits = bits_of<k, V::lanes>(m);
    const T* q = p + k * V::lanes;
    using R = typename V::reg;
    if constexpr (sizeof(T) == 8) return narrow<R>(_mm512_maskz_loadu_epi64(bits, q));
    else if constexpr (sizeof(T) == 4) return narrow<R>(_mm512_maskz_loadu_epi32(bits, q));
    else if constexpr (sizeof(T) == 2) return narrow<R>(_mm512_maskz_loadu_epi16(bits, q));
    else return narrow<R>(_mm512_maskz_loadu_epi8(bits, q));
  });
}
template <class T, int W> PV_FN void store_masked(T* p, const Vec<T, W>& a, const Vec<bool, W>& m) {
  using V = Vec<T, W>;
  build<std::array<int, V::count>, V::count>([&](auto K) PV_INLINE {
    constexpr int k = decltype(K)::value;
    const uint64_t bits = bits_of<k, V::lanes>(m);
    T* q = p + k * V::lanes;
    if constexpr (sizeof(T) == 8) _mm512_mask_storeu_epi64(q, bits, full(a.r[k]));
    else if constexpr (sizeof(T) == 4) _mm512_mask_storeu_epi32(q, bits, full(a.r[k]));
    else if constexpr (sizeof(T) == 2) _mm512_mask_storeu_epi16(q, bits, full(a.r[k]));
    else _mm512_mask_storeu_epi8(q, bits, full(a.r[k]));
    return 0;
  });
}
#else

// A mask is 0 or -1 per lane, as wide as a float.
template <int W> struct Vec<bool, W> {
  static constexpr int count = Vec<int32_t, W>::count;
  using reg = typename Vec<int32_t, W>::reg;
  reg r[count];
};
template <int W> PV_FN Vec<int32_t, W> int_lanes(const Vec<bool, W>& m) {
  return build<Vec<int32_t, W>, Vec<int32_t, W>::count>([&](auto K) PV_INLINE { return m.r[K]; });
}

enum Predicate { EQ, LT, LE, NE, NOT_LE };
template <size_t SIZE> using IntOfSize = std::conditional_t<
    SIZE == 8, int64_t, std::conditional_t<SIZE == 4, int32_t, std::conditional_t<SIZE == 2, int16_t, int8_t>>>;

template <Predicate P, class T, int W> PV_FN Vec<bool, W> compare(const Vec<T, W>& a, const Vec<T, W>& b) {
  using I = IntOfSize<sizeof(T)>;
  const auto wide = build<Vec<I, W>, Vec<I, W>::count>([&](auto K) PV_INLINE {
    using R = typename Vec<I, W>::reg;
    if constexpr (P == EQ) return (R)(a.r[K] == b.r[K]);
    else if constexpr (P == LT) return (R)(a.r[K] < b.r[K]);
    else if constexpr (P == LE) return (R)(a.r[K] <= b.r[K]);
    else if constexpr (P == NOT_LE) return ~(R)(a.r[K] <= b.r[K]);
    else return (R)(a.r[K] != b.r[K]);
  });
  const auto lanes = convert<int32_t>(wide);
  return build<Vec<bool, W>, Vec<bool, W>::count>([&](auto K) PV_INLINE { return lanes.r[K]; });
}

template <class T, int W>
PV_FN Vec<T, W> where(const Vec<bool, W>& m, const Vec<T, W>& a, const Vec<T, W>& b) {
  using V = Vec<T, W>;
  if constexpr (std::is_same_v<T, bool>) {
    return build<V, V::count>([&](auto K) PV_INLINE { return (m.r[K] & a.r[K]) | (~m.r[K] & b.r[K]); });
  } else {
    const auto wide = convert<IntOfSize<sizeof(T)>>(int_lanes(m));
    return build<V, V::count>([&](auto K) PV_INLINE { return wide.r[K] ? a.r[K] : b.r[K]; });
  }
}

template <int W> PV_FN bool any(const Vec<bool, W>& m) {
  auto all = m.r[0];
  for (int k = 1; k < Vec<bool, W>::count; k++) all |= m.r[k];
  return !_mm256_testz_si256((__m256i)all, (__m256i)all);
}

// Lanes [0, n) of W.
template <int W> PV_FN Vec<bool, W> first_lanes(int64_t n) {
  return build<Vec<bool, W>, Vec<bool, W>::count>([&](auto K) PV_INLINE {
    constexpr int k = decltype(K)::value * 8;
    const int first = int(n) - k;
    return (typename Vec<bool, W>::reg){0, 1, 2, 3, 4, 5, 6, 7} < first;
  });
}

template <class T, int W> PV_FN Vec<T, W> load_masked(const T* p, const Vec<bool, W>& m) {
  alignas(32) int32_t on[W];
  alignas(32) T lanes[W];
  std::memcpy(on, m.r, sizeof on);
  for (int k = 0; k < W; k++) lanes[k] = on[k] ? p[k] : T();
  Vec<T, W> result;
  std::memcpy(result.r, lanes, sizeof lanes);
  return result;
}
template <class T, int W> PV_FN void store_masked(T* p, const Vec<T, W>& a, const Vec<bool, W>& m) {
  alignas(32) int32_t on[W];
  alignas(32) T lanes[W];
  std::memcpy(on, m.r, sizeof on);
  std::memcpy(lanes, a.r, sizeof lanes);
  for (int k = 0; k < W; k++)
    if (on[k]) p[k] = lanes[k];
}

#endif

// ------------------------------------------------------------------------------------------------ lanes

template <int W, class T> PV_FN Vec<T, W> splat(T a) {
  using V = Vec<T, W>;
  if constexpr (std::is_same_v<T, bool>) {
    return build<V, V::count>([&](auto) PV_INLINE { return typename V::reg() - a; });
  } else {
    return build<V, V::count>([&](auto) PV_INLINE {
      return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
        return typename V::reg{(void(K), a)...};
      }(std::make_integer_sequence<int, V::lanes>());
    });
  }
}

// base + k * step in lane k.
template <int W> PV_FN Vec<int64_t, W> iota(int64_t base, int64_t step) {
  using V = Vec<int64_t, W>;
  return build<V, V::count>([&](auto R) PV_INLINE {
    return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
      return typename V::reg{(base + (decltype(R)::value * V::lanes + K) * step)...};
    }(std::make_integer_sequence<int, V::lanes>());
  });
}

// The lanes of a vector in memory, for what is done one lane at a time.
template <class T, int W> struct Lanes {
  alignas(64) T lane[W];
  PV_FN T operator[](int k) const { return lane[k]; }
};
template <class T, int W> PV_FN Lanes<T, W> lanes(const Vec<T, W>& a) {
  Lanes<T, W> out;
  if constexpr (std::is_same_v<T, bool>) {
    const auto bytes = where(a, splat<W>(uint8_t(1)), splat<W>(uint8_t(0)));
    std::memcpy(out.lane, bytes.r, sizeof out.lane);
  } else {
    std::memcpy(out.lane, a.r, sizeof out.lane);
  }
  return out;
}
template <class T, int W> PV_FN Vec<T, W> from_lanes(const Lanes<T, W>& a) {
  if constexpr (std::is_same_v<T, bool>) {
    Vec<uint8_t, W> bytes;
    std::memcpy(bytes.r, a.lane, sizeof a.lane);
    return compare<NE>(bytes, splat<W>(uint8_t(0)));
  } else {
    Vec<T, W> out;
    std::memcpy(out.r, a.lane, sizeof a.lane);
    return out;
  }
}

// f of each lane, for operators without vector instructions.
template <class F, class T, int W, class... More>
PV_FN auto lanewise(F f, const Vec<T, W>& a, const More&... more) {
  const auto first = lanes(a);
  return [&](const auto&... rest) PV_INLINE {
    Lanes<decltype(f(first[0], rest[0]...)), W> out;
    for (int k = 0; k < W; k++) out.lane[k] = f(first[k], rest[k]...);
    return from_lanes(out);
  }(lanes(more)...);
}

// Which lanes of a step are in use: all of them, or the first n.
template <int W> struct All {};
template <int W> struct Some {
  int64_t n;
  Vec<bool, W> mask;
  PV_FN explicit Some(int64_t n) : n(n), mask(first_lanes<W>(n)) {}
};
template <int W> PV_FN int64_t active(All<W>) { return W; }
template <int W> PV_FN int64_t active(const Some<W>& n) { return n.n; }

// ------------------------------------------------------------------------------------------------ memory

// How an element lies in memory (Raw) and the type it is computed in (Value).
template <class T> struct Element { using raw = T; using value = T; };
template <> struct Element<bf16> { using raw = uint16_t; using value = float; };
template <> struct Element<f16> { using raw = uint16_t; using value = float; };
template <> struct Element<bool> { using raw = uint8_t; using value = bool; };
template <class T> using Raw = typename Element<T>::raw;
template <class T> using Value = typename Element<T>::value;

PV_FN float from_bits(uint32_t bits) { float a; std::memcpy(&a, &bits, 4); return a; }
PV_FN uint32_t to_bits(float a) { uint32_t bits; std::memcpy(&bits, &a, 4); return bits; }

// The upper half of a float, rounded to nearest even; NaN stays NaN.
PV_FN uint16_t bf16_bits(float a) {
  const uint32_t bits = to_bits(a);
  return a != a ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T> PV_FN Value<T> widen(Raw<T> a) {
  if constexpr (std::is_same_v<T, bf16>) return from_bits(uint32_t(a) << 16);
  else if constexpr (std::is_same_v<T, f16>) return _cvtsh_ss(a);
  else if constexpr (std::is_same_v<T, bool>) return a != 0;
  else return a;
}
template <class T> PV_FN Raw<T> shrink(Value<T> a) {
  if constexpr (std::is_same_v<T, bf16>) return bf16_bits(a);
  else if constexpr (std::is_same_v<T, f16>) return _cvtss_sh(a, _MM_FROUND_TO_NEAREST_INT);
  else return a;
}

// Between 16 and 32 bits, written out because compilers take the long way round.
template <int W> PV_FN Vec<uint32_t, W> widen_16(const Vec<uint16_t, W>& a) {
#ifdef __AVX512F__
  return convert<uint32_t>(a, [](auto x) PV_INLINE { return (Reg<uint32_t, 16>)_mm512_cvtepu16_epi32((__m256i)x); });
#else
  return convert<uint32_t>(a, [](auto x) PV_INLINE { return (Reg<uint32_t, 8>)_mm256_cvtepu16_epi32((__m128i)x); });
#endif
}
template <int W> PV_FN Vec<uint16_t, W> narrow_16(const Vec<uint32_t, W>& a) {
#ifdef __AVX512F__
  return convert<uint16_t>(a, [](auto x) PV_INLINE { return (Reg<uint16_t, 16>)_mm512_cvtepi32_epi16((__m512i)x); });
#else
  return convert<uint16_t>(a, [](auto x) PV_INLINE {
    const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);  // of each half, twice
    return (Reg<uint16_t, 8>)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  });
#endif
}

template <class T, int W> PV_FN Vec<Value<T>, W> widen(const Vec<Raw<T>, W>& a) {
  if constexpr (std::is_same_v<T, bf16>) {
    return as<float>(map<uint32_t>([](auto x) PV_INLINE { return x << 16; }, widen_16(a)));
  } else if constexpr (std::is_same_v<T, f16>) {
#ifdef __AVX512F__
    return convert<float>(a, [](auto x) PV_INLINE { return (Reg<float, 16>)_mm512_cvtph_ps((__m256i)x); });
#else
    return convert<float>(a, [](auto x) PV_INLINE { return (Reg<float, 8>)_mm256_cvtph_ps((__m128i)x); });
#endif
  } else if constexpr (std::is_same_v<T, bool>) {
    return compare<NE>(a, splat<W>(uint8_t(0)));
  } else {
    return a;
  }
}
template <class T, int W> PV_FN Vec<Raw<T>, W> shrink(const Vec<Value<T>, W>& a) {
  if constexpr (std::is_same_v<T, bf16>) {
    const auto rounded = map<uint32_t>([](auto x) PV_INLINE { return (x + 0x7fff + (x >> 16 & 1)) >> 16; },
                                       as<uint32_t>(a));
    return narrow_16(where(compare<NE>(a, a), splat<W>(uint32_t(0x7fc0)), rounded));
  } else if constexpr (std::is_same_v<T, f16>) {
#ifdef __AVX512F__
    return convert<uint16_t>(a, [](auto x) PV_INLINE { return (Reg<uint16_t, 16>)_mm512_cvtps_ph((__m512)x, 0); });
#else
    return convert<uint16_t>(a, [](auto x) PV_INLINE { return (Reg<uint16_t, 8>)_mm256_cvtps_ph((__m256)x, 0); });
#endif
  } else if constexpr (std::is_same_v<T, bool>) {
    return where(a, splat<W>(uint8_t(1)), splat<W>(uint8_t(0)));
  } else {
    return a;
  }
}

template <class T> PV_FN Value<T> load(const T* p) { return widen<T>(*(const Raw<T>*)p); }
template <class T> PV_FN Value<T> load(const T* p, bool mask, Value<T> other) { return mask ? load(p) : other; }
template <class T> PV_FN void store(T* p, Value<T> a) { *(Raw<T>*)p = shrink<T>(a); }

template <class T, int W> PV_FN Vec<Value<T>, W> load(const T* p, All<W>) {
  using V = Vec<Raw<T>, W>;
  using U = typename RegisterOf<Raw<T>, V::lanes>::unaligned;
  return widen<T, W>(build<V, V::count>([&](auto K) PV_INLINE {
    return (typename V::reg)*(const U*)((const Raw<T>*)p + decltype(K)::value * V::lanes);
  }));
}
template <class T, int W> PV_FN Vec<Value<T>, W> load(const T* p, const Some<W>& n) {
  return widen<T, W>(load_masked((const Raw<T>*)p, n.mask));
}
template <int W> PV_FN Vec<bool, W> both(const Vec<bool, W>& m, All<W>) { return m; }
template <int W> PV_FN Vec<bool, W> both(const Vec<bool, W>& m, const Some<W>& n) {
  return build<Vec<bool, W>, Vec<bool, W>::count>([&](auto K) PV_INLINE {
    return typename Vec<bool, W>::reg(m.r[K] & n.mask.r[K]);
  });
}
template <class T, int W, class N>
PV_FN Vec<Value<T>, W> load(const T* p, const N& n, const Vec<bool, W>& mask, Value<T> other) {
  return where(mask, widen<T, W>(load_masked((const Raw<T>*)p, both(mask, n))), splat<W>(other));
}

template <class T, int W> PV_FN void store(T* p, const Vec<Value<T>, W>& a, All<W>) {
  using V = Vec<Raw<T>, W>;
  using U = typename RegisterOf<Raw<T>, V::lanes>::unaligned;
  const V raw = shrink<T, W>(a);
  build<std::array<int, V::count>, V::count>([&](auto K) PV_INLINE {
    *(U*)((Raw<T>*)p + decltype(K)::value * V::lanes) = raw.r[K];
    return 0;
  });
}
template <class T, int W> PV_FN void store(T* p, const Vec<Value<T>, W>& a, const Some<W>& n) {
  store_masked((Raw<T>*)p, shrink<T, W>(a), n.mask);
}

// A store past the caches, for whole registers at aligned addresses; `stream_end` makes them visible to other threads.
template <class R> PV_FN void stream_register(void* p, R a) {
  if (uintptr_t(p) % sizeof(R) != 0) std::memcpy(p, &a, sizeof(R));
#ifdef __AVX512F__
  else if constexpr (sizeof(R) == 64) _mm512_stream_si512((__m512i*)p, (__m512i)a);
#endif
  else if constexpr (sizeof(R) == 32) _mm256_stream_si256((__m256i*)p, (__m256i)a);
  else if constexpr (sizeof(R) == 16) _mm_stream_si128((__m128i*)p, (__m128i)a);
  else std::memcpy(p, &a, sizeof(R));
}
template <class T, int W> PV_FN void stream(T* p, const Vec<Value<T>, W>& a, All<W>) {
  using V = Vec<Raw<T>, W>;
  const V raw = shrink<T, W>(a);
  build<std::array<int, V::count>, V::count>([&](auto K) PV_INLINE {
    stream_register((Raw<T>*)p + decltype(K)::value * V::lanes, raw.r[K]);
    return 0;
  });
}
template <class T, int W> PV_FN void stream(T* p, const Vec<Value<T>, W>& a, const Some<W>& n) { store<T>(p, a, n); }
PV_FN void stream_end() { _mm_sfence(); }

// Element `at(k)` of p in lane k: strided and indirect access, one lane at a time.
template <class T, class N, int W, class F> PV_FN Vec<Value<T>, W> gather_lanes(const T* p, const N& n, All<W>, F at) {
  Lanes<Raw<T>, W> out = {};
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) out.lane[k] = ((const Raw<T>*)p)[at(k)];
  return widen<T, W>(from_lanes(out));
}
template <int W, class T, class N, class F> PV_FN Vec<Value<T>, W> gather(const T* p, const N& n, F at) {
  return gather_lanes(p, n, All<W>(), at);
}
template <int W, class T, class N, class F>
PV_FN Vec<Value<T>, W> gather(const T* p, const N& n, F at, const Vec<bool, W>& mask, Value<T> other) {
  Lanes<Value<T>, W> out = {};
  const auto on = lanes(mask);
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) out.lane[k] = on[k] ? load(p + at(k)) : other;
  return from_lanes(out);
}
// Memory joined with a value by `join`; scatters one lane after the other, so that lanes may name the same element.
template <class T, class J> PV_FN void update(T* p, Value<T> a, J join) { store(p, join(load(p), a)); }
template <class T, int W, class N, class J> PV_FN void update(T* p, const Vec<Value<T>, W>& a, const N& n, J join) {
  store<T>(p, join(load<T>(p, n), a), n);
}
template <class T, int W, class N, class F, class J>
PV_FN void scatter(T* p, const Vec<Value<T>, W>& a, const N& n, F at, J join) {
  const auto from = lanes(a);
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) update(p + at(k), from[k], join);
}
template <class T, int W, class N, class F> PV_FN void scatter(T* p, const Vec<Value<T>, W>& a, const N& n, F at) {
  const auto from = lanes(shrink<T, W>(a));
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) ((Raw<T>*)p)[at(k)] = from[k];
}

// Row i and row i + S of a square exchange the blocks that lie across its diagonal.
template <int S, class V> PV_FN void exchange(typename V::reg& upper, typename V::reg& lower) {
  constexpr int L = V::lanes;
  [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
    const auto a = upper, b = lower;
    upper = __builtin_shufflevector(a, b, (K & S ? L + K - S : K)...);
    lower = __builtin_shufflevector(a, b, (K & S ? L + K : K + S)...);
  }(std::make_integer_sequence<int, L>());
}
template <int S, class V, size_t... I> PV_FN void exchange_all(typename V::reg* r, std::index_sequence<I...>) {
  ([&]() PV_INLINE { if constexpr (!(I & S)) exchange<S, V>(r[I], r[I + S]); }(), ...);
}
template <int S, class V> PV_FN void transpose(typename V::reg* r) {
  if constexpr (S > 0) {
    exchange_all<S, V>(r, std::make_index_sequence<V::lanes>());
    transpose<S / 2, V>(r);
  }
}

// W x W elements that are rows in memory, `step` apart, and columns in the kernel: a load reads the rows and gives the
// columns one by one, a store is given the columns and writes the rows. Of each row `count` elements are meant, and as
// many rows as `n` has lanes.
template <class T, int W> struct Tile {
  using V = Vec<Raw<T>, W>;
  using U = typename RegisterOf<Raw<T>, V::lanes>::unaligned;
  V column[W];

  Tile() = default;
  // The rows start at p[at]. With `numel` >= 0, p has that many elements, and none beyond them is touched: what
  // is meant may lie outside for columns that a mask leaves out.
  template <class N> PV_FN Tile(const T* p, int64_t at, int64_t step, int64_t count, const N& n, int64_t numel) {
    const int64_t last = at + (W - 1) * step, low = last < at ? last : at, high = (last < at ? at : last) + W;
    const bool whole = numel >= 0 ? low >= 0 && high <= numel : count == W && active(n) == W;
    if (whole) {
      read_blocks([&](auto i) PV_INLINE { return (const Raw<T>*)p + at + decltype(i)::value * step; });
    } else {
      part((const Raw<T>*)p, at, step, count, active(n), numel);
    }
  }
  PV_FN Vec<Value<T>, W> row(int64_t k) const { return widen<T, W>(column[k]); }

  PV_FN void put(int64_t k, const Vec<Value<T>, W>& a) { column[k] = shrink<T, W>(a); }
  template <bool PAST_CACHE, class N> PV_FN void write(T* p, int64_t step, int64_t count, const N& n) const {
    Raw<T>* q = (Raw<T>*)p;
    if (count == W && active(n) == W) {
      write_blocks([&](auto i, auto j, const typename V::reg& a) PV_INLINE {
        Raw<T>* to = q + decltype(i)::value * step + decltype(j)::value;
        if constexpr (PAST_CACHE) stream_register(to, a);
        else *(U*)to = a;
      });
    } else {
      const int64_t rows = active(n);
      for (int64_t k = 0; k < count; k++) {
        const Lanes<Raw<T>, W> lane = lanes(column[k]);
        for (int64_t i = 0; i < rows; i++) q[i * step + k] = lane[int(i)];
      }
    }
  }

 private:
  static constexpr int L = V::lanes, C = V::count;
  // Blocks of L x L: rows given by `from` become columns, or columns become rows that `to` takes.
  template <class F> PV_FN void read_blocks(F from) {
    each([&](auto i, auto j) PV_INLINE {
      constexpr int I = decltype(i)::value, J = decltype(j)::value;
      [&]<size_t... K>(std::index_sequence<K...>) PV_INLINE {
        typename V::reg r[L] = {(typename V::reg)*(const U*)(from(std::integral_constant<int, I * L + int(K)>()) + J * L)...};
        transpose<L / 2, V>(r);
        ((column[J * L + K].r[I] = r[K]), ...);
      }(std::make_index_sequence<L>());
    });
  }
  template <class F> PV_FN void write_blocks(F to) const {
    each([&](auto i, auto j) PV_INLINE {
      constexpr int I = decltype(i)::value, J = decltype(j)::value;
      [&]<size_t... K>(std::index_sequence<K...>) PV_INLINE {
        typename V::reg r[L] = {column[J * L + K].r[I]...};
        transpose<L / 2, V>(r);
        (to(std::integral_constant<int, I * L + int(K)>(), std::integral_constant<int, J * L>(), r[K]), ...);
      }(std::make_index_sequence<L>());
    });
  }
  template <class F> PV_FN static void each(F f) {
    [&]<size_t... B>(std::index_sequence<B...>) PV_INLINE {
      (f(std::integral_constant<int, int(B) / C>(), std::integral_constant<int, int(B) % C>()), ...);
    }(std::make_index_sequence<C * C>());
  }
  void part(const Raw<T>* p, int64_t at, int64_t step, int64_t count, int64_t rows, int64_t numel) {
    Raw<T> lane[W][W] = {};
    for (int64_t row = 0; row < rows; row++)
      for (int64_t k = 0; k < count; k++) {
        const int64_t i = at + row * step + k;
        if (numel < 0 || (i >= 0 && i < numel)) lane[k][row] = p[i];
      }
    std::memcpy(column, lane, sizeof lane);
  }
};

// The integer f(k) in lane k.
template <int W, class F> PV_FN Vec<int64_t, W> indices(F f) {
  Lanes<int64_t, W> out;
  for (int k = 0; k < W; k++) out.lane[k] = f(k);
  return from_lanes(out);
}

// ------------------------------------------------------------------------------------------------ conversion

// A float to u32 or u64 goes through the signed type as in ATen: what is too large for that is first less by 2^31 or 2^63.
template <class To, class From>
constexpr bool is_wide_unsigned = is_float<From> && sizeof(To) >= 4 && std::is_unsigned_v<To>;
template <class To> constexpr To sign_bit = To(1) << (8 * sizeof(To) - 1);

template <class To, class From> PV_FN To cast(From a) {
  if constexpr (std::is_same_v<To, bool>) return a != From(0);
  else if constexpr (is_float<From> && !is_float<To> && sizeof(To) < 4) return To(int32_t(a));  // the low bits
  else if constexpr (is_wide_unsigned<To, From>) {
    using S = std::make_signed_t<To>;
    return a >= From(sign_bit<To>) ? To(S(a - From(sign_bit<To>))) ^ sign_bit<To> : To(S(a));
  } else return To(a);
}
template <class To, class From, int W> PV_FN Vec<To, W> cast(const Vec<From, W>& a) {
  if constexpr (std::is_same_v<To, From>) return a;
  else if constexpr (std::is_same_v<To, bool>) return compare<NE>(a, splat<W>(From(0)));
  else if constexpr (std::is_same_v<From, bool>) return where(a, splat<W>(To(1)), splat<W>(To(0)));
  else if constexpr (is_float<From> && !is_float<To> && sizeof(To) < 4) return convert<To>(convert<int32_t>(a));
  else if constexpr (is_float<To> && sizeof(From) < 4) return convert<To>(convert<int32_t>(a));
  else if constexpr (is_wide_unsigned<To, From>) {
    using S = std::make_signed_t<To>;
    const auto high = splat<W>(From(sign_bit<To>));
    const auto flipped = bitwise_xor(convert<S>(sub(a, high)), splat<W>(S(sign_bit<To>)));
    return as<To>(where(ge(a, high), flipped, convert<S>(a)));
  } else return convert<To>(a);
}

// ------------------------------------------------------------------------------------------------ scalar operators

template <class T> PV_FN T add(T a, T b) { if constexpr (is_float<T>) return a + b; else return T(Wrap<T>(a) + Wrap<T>(b)); }
template <class T> PV_FN T sub(T a, T b) { if constexpr (is_float<T>) return a - b; else return T(Wrap<T>(a) - Wrap<T>(b)); }
template <class T> PV_FN T mul(T a, T b) { if constexpr (is_float<T>) return a * b; else return T(Wrap<T>(a) * Wrap<T>(b)); }
template <class T> PV_FN T neg(T a) { if constexpr (is_float<T>) return -a; else return T(-Wrap<T>(a)); }
template <class T> PV_FN T abs(T a) { if constexpr (is_float<T>) return std::fabs(a); else return a < 0 ? neg(a) : a; }
template <class T> PV_FN T div(T a, T b) { return a / b; }
template <class T> PV_FN T reciprocal(T a) { return T(1) / a; }
template <class T> PV_FN T fma(T a, T b, T c) { return std::fma(a, b, c); }
template <class T> PV_FN T sign(T a) { return T((a > 0) - (a < 0)); }
template <class T> PV_FN T maximum(T a, T b) { return a != a || a > b ? a : b; }
template <class T> PV_FN T minimum(T a, T b) { return a != a || a < b ? a : b; }

// Integer division never traps: by zero the result is 0 (eager raises an error), and the least integer by -1 wraps.
template <class T> PV_FN T truncdiv(T a, T b) {
  if constexpr (is_float<T>) return std::trunc(a / b);
  else if (b == 0) return 0;
  else return std::is_signed_v<T> && b == T(-1) ? neg(a) : T(a / b);
}
template <class T> PV_FN T fmod(T a, T b) {
  if constexpr (is_float<T>) return std::fmod(a, b);
  else return b == 0 || (std::is_signed_v<T> && b == T(-1)) ? T(0) : T(a % b);
}
template <class T> PV_FN T remainder(T a, T b) {
  const T rest = fmod(a, b);
  return rest != 0 && (b < 0) != (rest < 0) ? add(rest, b) : rest;
}
template <class T> PV_FN T floordiv(T a, T b) {
  if constexpr (is_float<T>) {
    if (b == 0) return a / b;
    const T rest = std::fmod(a, b);
    T quotient = (a - rest) / b;
    if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
    if (quotient == 0) return std::copysign(T(0), a / b);
    const T whole = std::floor(quotient);
    return quotient - whole > T(0.5) ? whole + 1 : whole;
  } else {
    const T quotient = truncdiv(a, b), rest = fmod(a, b);
    return rest != 0 && (b < 0) != (rest < 0) ? sub(quotient, T(1)) : quotient;
  }
}
template <class T> PV_FN T pow(T a, T b) {
  if constexpr (is_float<T>) return std::pow(a, b);
  else {
    if (b < 0) return a == 1 ? 1 : a == T(-1) ? (b & 1 ? T(-1) : T(1)) : 0;
    T result = 1;
    for (; b > 0; b = T(b >> 1), a = mul(a, a)) if (b & 1) result = mul(result, a);
    return result;
  }
}

template <class T> PV_FN bool eq(T a, T b) { return a == b; }
template <class T> PV_FN bool ne(T a, T b) { return a != b; }
template <class T> PV_FN bool lt(T a, T b) { return a < b; }
template <class T> PV_FN bool le(T a, T b) { return a <= b; }
template <class T> PV_FN bool gt(T a, T b) { return a > b; }
template <class T> PV_FN bool ge(T a, T b) { return a >= b; }
template <class T> PV_FN bool isnan(T a) { return a != a; }
template <class T> PV_FN bool isinf(T a) { return std::fabs(a) == inf<T>; }

template <class T> PV_FN T bitwise_and(T a, T b) { return T(a & b); }
template <class T> PV_FN T bitwise_or(T a, T b) { return T(a | b); }
template <class T> PV_FN T bitwise_xor(T a, T b) { return T(a ^ b); }
template <class T> PV_FN T bitwise_not(T a) { if constexpr (std::is_same_v<T, bool>) return !a; else return T(~a); }

// A shift by a negative count, or by all bits or more, shifts everything out.
template <class T> PV_FN T shl(T a, T b) { return b < 0 || b >= T(8 * sizeof(T)) ? T(0) : T(Wrap<T>(a) << b); }
template <class T> PV_FN T shr(T a, T b) {
  constexpr T most = T(8 * sizeof(T) - std::is_signed_v<T>);
  return b < 0 || b >= most ? (std::is_signed_v<T> && a < 0 ? T(-1) : T(0)) : T(a >> b);
}
template <class T> PV_FN T where(bool c, T a, T b) { return c ? a : b; }

template <class T> PV_FN T round_bf16(T a) { return from_bits(uint32_t(bf16_bits(float(a))) << 16); }
template <class T> PV_FN T round_f16(T a) { return _cvtsh_ss(_cvtss_sh(float(a), _MM_FROUND_TO_NEAREST_INT)); }
template <class T> PV_FN T round(T a) { return std::nearbyint(a); }
template <class T> PV_FN T rsqrt(T a) { return T(1) / std::sqrt(a); }
template <class T> PV_FN T sigmoid(T a) { return T(1) / (T(1) + std::exp(-a)); }

#define PV_SCALAR(name) template <class T> PV_FN T name(T a) { return std::name(a); }
PV_SCALAR(floor) PV_SCALAR(ceil) PV_SCALAR(trunc) PV_SCALAR(sqrt)
PV_SCALAR(exp) PV_SCALAR(exp2) PV_SCALAR(expm1) PV_SCALAR(log) PV_SCALAR(log2) PV_SCALAR(log10) PV_SCALAR(log1p)
PV_SCALAR(sin) PV_SCALAR(cos) PV_SCALAR(tan) PV_SCALAR(asin) PV_SCALAR(acos) PV_SCALAR(atan)
PV_SCALAR(sinh) PV_SCALAR(cosh) PV_SCALAR(tanh) PV_SCALAR(asinh) PV_SCALAR(acosh) PV_SCALAR(atanh)
PV_SCALAR(erf) PV_SCALAR(erfc) PV_SCALAR(lgamma)
#undef PV_SCALAR
template <class T> PV_FN T atan2(T a, T b) { return std::atan2(a, b); }
template <class T> PV_FN T hypot(T a, T b) { return std::hypot(a, b); }

// ------------------------------------------------------------------------------------------------ vector operators

// The same register as unsigned lanes, on which integer arithmetic wraps around; floats stay floats.
template <class T, int L> PV_FN auto wrapping(Reg<T, L> a) {
  if constexpr (is_float<T>) return a;
  else return (Reg<std::make_unsigned_t<T>, L>)a;
}
#define PV_ARITHMETIC(name, OPERATOR)                                                                    \
  template <class T, int W> PV_FN Vec<T, W> name(const Vec<T, W>& a, const Vec<T, W>& b) {               \
    constexpr int L = Vec<T, W>::lanes;                                                                  \
    return map<T>([](auto x, auto y) PV_INLINE {                                                         \
      return (Reg<T, L>)(wrapping<T, L>(x) OPERATOR wrapping<T, L>(y));                                  \
    }, a, b);                                                                                            \
  }
PV_ARITHMETIC(add, +) PV_ARITHMETIC(sub, -) PV_ARITHMETIC(mul, *)
#undef PV_ARITHMETIC

#define PV_BITWISE(name, OPERATOR)                                                                       \
  template <class T, int W> PV_FN Vec<T, W> name(const Vec<T, W>& a, const Vec<T, W>& b) {               \
    return build<Vec<T, W>, Vec<T, W>::count>([&](auto K) PV_INLINE {                                    \
      return typename Vec<T, W>::reg(a.r[K] OPERATOR b.r[K]);                                            \
    });                                                                                                  \
  }
PV_BITWISE(bitwise_and, &) PV_BITWISE(bitwise_or, |) PV_BITWISE(bitwise_xor, ^)
#undef PV_BITWISE
template <class T, int W> PV_FN Vec<T, W> bitwise_not(const Vec<T, W>& a) {
  return build<Vec<T, W>, Vec<T, W>::count>([&](auto K) PV_INLINE { return typename Vec<T, W>::reg(~a.r[K]); });
}

template <class T, int W> PV_FN Vec<T, W> div(const Vec<T, W>& a, const Vec<T, W>& b) {
  return map<T>([](auto x, auto y) PV_INLINE { return x / y; }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> reciprocal(const Vec<T, W>& a) { return div(splat<W>(T(1)), a); }
template <class T, int W> PV_FN Vec<T, W> neg(const Vec<T, W>& a) {
  if constexpr (is_float<T>) return map<T>([](auto x) PV_INLINE { return -x; }, a);
  else return sub(splat<W>(T(0)), a);
}

template <class T, int W> PV_FN Vec<bool, W> eq(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_not(bitwise_xor(a, b)); else return compare<EQ>(a, b);
}
template <class T, int W> PV_FN Vec<bool, W> ne(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_xor(a, b); else return compare<NE>(a, b);
}
template <class T, int W> PV_FN Vec<bool, W> lt(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_and(bitwise_not(a), b); else return compare<LT>(a, b);
}
template <class T, int W> PV_FN Vec<bool, W> le(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_or(bitwise_not(a), b); else return compare<LE>(a, b);
}
template <class T, int W> PV_FN Vec<bool, W> gt(const Vec<T, W>& a, const Vec<T, W>& b) { return lt(b, a); }
template <class T, int W> PV_FN Vec<bool, W> ge(const Vec<T, W>& a, const Vec<T, W>& b) { return le(b, a); }
template <class T, int W> PV_FN Vec<bool, W> isnan(const Vec<T, W>& a) { return compare<NE>(a, a); }

// With one NaN among the arguments the hardware returns the second, so only a NaN in the first needs care.
template <class T, int W> PV_FN Vec<T, W> maximum(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_or(a, b);
  else if constexpr (std::is_same_v<T, float>)
    return where(isnan(a), a, map<T>([](auto x, auto y) PV_INLINE { return (decltype(x))PV_PS(max)(x, y); }, a, b));
  else if constexpr (std::is_same_v<T, double>)
    return where(isnan(a), a, map<T>([](auto x, auto y) PV_INLINE { return (decltype(x))PV_PD(max)(x, y); }, a, b));
  else return map<T>([](auto x, auto y) PV_INLINE { return x > y ? x : y; }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> minimum(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_and(a, b);
  else if constexpr (std::is_same_v<T, float>)
    return where(isnan(a), a, map<T>([](auto x, auto y) PV_INLINE { return (decltype(x))PV_PS(min)(x, y); }, a, b));
  else if constexpr (std::is_same_v<T, double>)
    return where(isnan(a), a, map<T>([](auto x, auto y) PV_INLINE { return (decltype(x))PV_PD(min)(x, y); }, a, b));
  else return map<T>([](auto x, auto y) PV_INLINE { return x < y ? x : y; }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> abs(const Vec<T, W>& a) {
  if constexpr (is_float<T>) {
    using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    return as<T>(bitwise_and(as<U>(a), splat<W>(U(U(-1) >> 1))));
  } else {
    return std::is_signed_v<T> ? maximum(a, neg(a)) : a;
  }
}
// The size of a with the sign of b.
template <class T, int W> PV_FN Vec<T, W> copysign(const Vec<T, W>& a, const Vec<T, W>& b) {
  using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  const auto rest = splat<W>(U(U(-1) >> 1));
  return as<T>(bitwise_or(bitwise_and(as<U>(a), rest), bitwise_and(as<U>(b), bitwise_not(rest))));
}
template <class T, int W> PV_FN Vec<bool, W> isinf(const Vec<T, W>& a) { return eq(abs(a), splat<W>(inf<T>)); }
template <class T, int W> PV_FN Vec<T, W> sign(const Vec<T, W>& a) {
  const auto zero = splat<W>(T(0));
  const auto minus = std::is_signed_v<T> || is_float<T> ? splat<W>(T(-1)) : zero;
  return where(gt(a, zero), splat<W>(T(1)), where(lt(a, zero), minus, zero));
}

// An intrinsic of the float and of the double registers.
#define PV_INTRINSIC(name, F, D)                                                                         \
  template <class T, int W> PV_FN Vec<T, W> name(const Vec<T, W>& a) {                                   \
    if constexpr (sizeof(T) == 4) return map<T>([](auto x) PV_INLINE { return (decltype(x))F; }, a);     \
    else return map<T>([](auto x) PV_INLINE { return (decltype(x))D; }, a);                              \
  }
PV_INTRINSIC(sqrt, PV_PS(sqrt)(x), PV_PD(sqrt)(x))
PV_INTRINSIC(floor, PV_PS(floor)(x), PV_PD(floor)(x))
PV_INTRINSIC(ceil, PV_PS(ceil)(x), PV_PD(ceil)(x))
#ifdef __AVX512F__
PV_INTRINSIC(trunc, _mm512_roundscale_ps(x, 11), _mm512_roundscale_pd(x, 11))
PV_INTRINSIC(round, _mm512_roundscale_ps(x, 8), _mm512_roundscale_pd(x, 8))
#else
PV_INTRINSIC(trunc, _mm256_round_ps(x, 11), _mm256_round_pd(x, 11))
PV_INTRINSIC(round, _mm256_round_ps(x, 8), _mm256_round_pd(x, 8))
#endif
#define PV_SLEEF(name, symbol, ulp) PV_INTRINSIC(name, PV_SLEEF_FU(symbol, ulp)(x), PV_SLEEF_DU(symbol, ulp)(x))
PV_SLEEF(exp2, exp2, u10) PV_SLEEF(expm1, expm1, u10)
PV_SLEEF(log, log, u10) PV_SLEEF(log2, log2, u10) PV_SLEEF(log10, log10, u10) PV_SLEEF(log1p, log1p, u10)
PV_SLEEF(sin, sin, u10) PV_SLEEF(cos, cos, u10) PV_SLEEF(tan, tan, u10)
PV_SLEEF(asin, asin, u10) PV_SLEEF(acos, acos, u10) PV_SLEEF(atan, atan, u10)
PV_SLEEF(sinh_sleef, sinh, u10) PV_SLEEF(cosh_sleef, cosh, u10)
PV_SLEEF(asinh_sleef, asinh, u10) PV_SLEEF(acosh_sleef, acosh, u10) PV_SLEEF(atanh, atanh, u10)
PV_SLEEF(erfc, erfc, u15) PV_SLEEF(lgamma, lgamma, u10)
PV_SLEEF(exp_sleef, exp, u10) PV_SLEEF(tanh_sleef, tanh, u10) PV_SLEEF(erf_sleef, erf, u10)
#undef PV_SLEEF
#undef PV_INTRINSIC

#define PV_BINARY(name, F, D)                                                                            \
  template <class T, int W> PV_FN Vec<T, W> name(const Vec<T, W>& a, const Vec<T, W>& b) {               \
    if constexpr (std::is_same_v<T, float>)                                                              \
      return map<T>([](auto x, auto y) PV_INLINE { return (decltype(x))F(x, y); }, a, b);                \
    else if constexpr (std::is_same_v<T, double>)                                                        \
      return map<T>([](auto x, auto y) PV_INLINE { return (decltype(x))D(x, y); }, a, b);                \
    else return lanewise([](T x, T y) PV_INLINE { return name(x, y); }, a, b);                           \
  }
PV_BINARY(pow, PV_SLEEF_FU(pow, u10), PV_SLEEF_DU(pow, u10))
PV_BINARY(atan2, PV_SLEEF_FU(atan2, u10), PV_SLEEF_DU(atan2, u10))
PV_BINARY(hypot, PV_SLEEF_FU(hypot, u05), PV_SLEEF_DU(hypot, u05))
#undef PV_BINARY

// Sleef's fmod gives NaN where the quotient is huge.
template <class T, int W> PV_FN Vec<T, W> fmod(const Vec<T, W>& a, const Vec<T, W>& b) {
  return lanewise([](T x, T y) PV_INLINE { return fmod(x, y); }, a, b);
}

template <class T, int W> PV_FN Vec<T, W> fma(const Vec<T, W>& a, const Vec<T, W>& b, const Vec<T, W>& c) {
  if constexpr (sizeof(T) == 4)
    return map<T>([](auto x, auto y, auto z) PV_INLINE { return (decltype(x))PV_PS(fmadd)(x, y, z); }, a, b, c);
  else
    return map<T>([](auto x, auto y, auto z) PV_INLINE { return (decltype(x))PV_PD(fmadd)(x, y, z); }, a, b, c);
}
// Sleef squares the argument; where that would overflow, both functions are log(2x).
template <class T> constexpr T squares_overflow = sizeof(T) == 4 ? T(1e18) : T(1e150);
template <class T, int W> PV_FN Vec<T, W> acosh(const Vec<T, W>& a) {
  const auto large = add(log(a), splat<W>(T(0.69314718055994530942)));
  return where(gt(a, splat<W>(squares_overflow<T>)), large, acosh_sleef(a));
}
template <class T, int W> PV_FN Vec<T, W> asinh(const Vec<T, W>& a) {
  const auto size = abs(a), large = add(log(size), splat<W>(T(0.69314718055994530942)));
  return where(gt(size, splat<W>(squares_overflow<T>)), copysign(large, a), asinh_sleef(a));
}

// exp, tanh and erf of floats are written out: models spend their time in them, and a call would spill all registers.
// The polynomials are least-maximum-error fits; each function is within 2 ulp of the exact result.

// The polynomial c0 + c1*x + c2*x^2 + ...
template <int W> PV_FN Vec<float, W> polynomial(const Vec<float, W>&, float c) { return splat<W>(c); }
template <int W, class... C> PV_FN Vec<float, W> polynomial(const Vec<float, W>& x, float c, C... more) {
  return fma(polynomial(x, more...), x, splat<W>(c));
}

// x limited to [low, high]; NaN stays NaN.
template <int W> PV_FN Vec<float, W> clamp(const Vec<float, W>& x, float low, float high) {
  return map<float>([](auto x, auto low, auto high) PV_INLINE {
    return (decltype(x))PV_PS(max)(low, PV_PS(min)(high, x));
  }, x, splat<W>(low), splat<W>(high));
}

// a * 2^n for whole n in [-252, 254].
template <int W> PV_FN Vec<float, W> scale(const Vec<float, W>& a, const Vec<float, W>& n) {
#ifdef __AVX512F__
  return map<float>([](auto x, auto y) PV_INLINE { return (decltype(x))_mm512_scalef_ps(x, y); }, a, n);
#else
  const auto power = [](const Vec<int32_t, W>& k) PV_INLINE {
    return as<float>(map<int32_t>([](auto x) PV_INLINE { return (x + 127) << 23; }, k));
  };
  const auto whole = convert<int32_t>(n), half = map<int32_t>([](auto x) PV_INLINE { return x >> 1; }, whole);
  return mul(mul(a, power(half)), power(sub(whole, half)));
#endif
}

// e^x = 2^n * e^r with n = round(x / ln 2): gives n, and e^r - 1 = r + r^2 * q(r).
template <int W> struct ExpParts { Vec<float, W> n, less_one; };
template <int W> PV_FN ExpParts<W> exp_parts(const Vec<float, W>& x) {
  const auto n = round(mul(x, splat<W>(0x1.715476p+0f)));
  auto r = fma(n, splat<W>(-0x1.62e430p-1f), x);
  r = fma(n, splat<W>(0x1.05c610p-29f), r);
  const auto q = polynomial(r, 0.5f, 0.166665182f, 0.041666206f, 0.00836891774f, 0.00139505405f);
  return {n, fma(mul(r, r), q, r)};
}

template <class T, int W> PV_FN Vec<T, W> exp(const Vec<T, W>& a) {
  if constexpr (sizeof(T) == 8) return exp_sleef(a);
  else {
    const auto parts = exp_parts(clamp(a, -104.0f, 89.0f));
    return scale(add(parts.less_one, splat<W>(1.0f)), parts.n);
  }
}

// Near 0 x + x^3 * p(x^2), elsewhere 1 - 2 / (e^2x + 1).
template <class T, int W> PV_FN Vec<T, W> tanh(const Vec<T, W>& a) {
  if constexpr (sizeof(T) == 8) return tanh_sleef(a);
  else {
    const auto x = clamp(abs(a), 0.0f, 10.0f), square = mul(x, x), one = splat<W>(1.0f);
    const auto p = polynomial(square, -0.333333284f, 0.133331999f, -0.0539531f, 0.0217847303f, -0.00859511457f,
                              0.00307859434f, -0.000841137313f, 0.000121470744f);
    const auto near = fma(mul(x, square), p, x);
    const auto parts = exp_parts(add(x, x));
    const auto power = scale(add(parts.less_one, one), parts.n);
    const auto far = sub(one, div(splat<W>(2.0f), add(power, one)));
    return copysign(where(lt(x, one), near, far), a);
  }
}

// Entry k % 16 of a table in each lane.
template <int W> PV_FN Vec<float, W> lookup(const float (&table)[16], const Vec<int32_t, W>& k) {
#ifdef __AVX512F__
  const __m512 all = _mm512_load_ps(table);
  return convert<float>(k, [&](auto x) PV_INLINE { return (Reg<float, 16>)_mm512_permutexvar_ps((__m512i)x, all); });
#else
  const __m256 low = _mm256_load_ps(table), high = _mm256_load_ps(table + 8);
  return convert<float>(k, [&](auto x) PV_INLINE {
    const __m256 a = _mm256_permutevar8x32_ps(low, (__m256i)x), b = _mm256_permutevar8x32_ps(high, (__m256i)x);
    return (Reg<float, 8>)_mm256_blendv_ps(a, b, (__m256)_mm256_slli_epi32((__m256i)x, 28));
  });
#endif
}

// Around the centre c = k * ERF_STEP that is nearest to |x|, erf is erf(c) + t * q(t) with t = |x| - c; around 0 it is
// x + x * q(x). The step is one for which the erf(c) are close to numbers that a float can hold. Row d of the table has
// the coefficients of t^d.
constexpr float ERF_STEP = 0x1.04b4p-2f;
alignas(64) constexpr float ERF[6][16] = {
    {0x0p+0f, 0x1.1ff016p-2f, 0x1.0e9c24p-1f, 0x1.7099bcp-1f, 0x1.b34bcep-1f, 0x1.db3a2p-1f, 0x1.f04188p-1f,
     0x1.f9ff4cp-1f, 0x1.fdf768p-1f, 0x1.ff6392p-1f, 0x1.ffd65ep-1f, 0x1.fff632p-1f, 0x1.fffdf6p-1f,
     0x1.ffffap-1f, 0x1.fffffp-1f, 0x1.fffffep-1f},
    {0x1.06eba8p-3f, 0x1.0ebc46p+0f, 0x1.bdc8f4p-1f, 0x1.4262c4p-1f, 0x1.9998ccp-2f, 0x1.c920aep-3f,
     0x1.c0252p-4f, 0x1.81ec1ap-5f, 0x1.23ee86p-6f, 0x1.83f724p-8f, 0x1.c4e71ap-10f, 0x1.d06d4p-12f,
     0x1.a2572ap-14f, 0x1.4b02fp-16f, 0x1.cc23p-19f, 0x1.18eea6p-21f},
    {0x0p+0f, -0x1.13b39ap-2f, -0x1.c5f85ep-2f, -0x1.ec7532p-2f, -0x1.a11e52p-2f, -0x1.22f582p-2f,
     -0x1.564ac6p-3f, -0x1.57e44p-4f, -0x1.29572p-5f, -0x1.bc6ffcp-7f, -0x1.200ep-8f, -0x1.43af7p-10f,
     -0x1.40b194p-12f, -0x1.10a042p-14f, -0x1.2e7048p-17f, -0x1.ec2704p-19f},
    {-0x1.81263ep-2f, -0x1.3a2e6p-2f, -0x1.1e2c3ep-3f, 0x1.1e9d5ap-5f, 0x1.254f02p-3f, 0x1.557454p-3f,
     0x1.11e22ep-3f, 0x1.58417ep-4f, 0x1.6306a2p-5f, 0x1.3327acp-6f, 0x1.c38424p-8f, 0x1.1c2b4cp-9f,
     0x1.33eb0ap-11f, 0x1.204e06p-13f, 0x1.d3ccaap-16f, 0x1.498b18p-18f},
    {0x0p+0f, 0x1.059bap-3f, 0x1.75550cp-3f, 0x1.2b92c4p-3f, 0x1.013eccp-4f, -0x1.612e42p-7f, -0x1.782172p-5f,
     -0x1.7e9b54p-5f, -0x1.044064p-5f, -0x1.17b414p-6f, -0x1.ebf42ap-8f, -0x1.7f5486p-9f, -0x1.8988bp-11f,
     -0x1.d5dec8p-13f, -0x1.ad9fa6p-13f, 0x1.3405fcp-14f},
    {0x1.cb84e6p-4f, 0x1.4176aap-4f, 0x1.372754p-8f, -0x1.c1715ep-5f, -0x1.17314p-4f, -0x1.698eacp-5f,
     -0x1.85cf76p-7f, 0x1.080cbep-7f, 0x1.aa83cep-7f, 0x1.449ea8p-7f, 0x1.612b1ep-8f, 0x1.2e0cf6p-9f,
     0x1.a65ef4p-11f, 0x1.ecd716p-13f, 0x1.e5d3a8p-15f, 0x1.97e5fp-17f},
};
template <class T, int W> PV_FN Vec<T, W> erf(const Vec<T, W>& a) {
  if constexpr (sizeof(T) == 8) return erf_sleef(a);
  else {
    const auto x = clamp(abs(a), 0.0f, 3.935f);  // from 3.926 on it is 1
    const auto centre = round(mul(x, splat<W>(1 / ERF_STEP)));
    const auto t = fma(centre, splat<W>(-ERF_STEP), x);
    const auto k = convert<int32_t>(centre);
    auto q = lookup(ERF[5], k);
    q = fma(q, t, lookup(ERF[4], k));
    q = fma(q, t, lookup(ERF[3], k));
    q = fma(q, t, lookup(ERF[2], k));
    q = fma(q, t, lookup(ERF[1], k));
    const auto base = where(eq(centre, splat<W>(0.0f)), t, lookup(ERF[0], k));
    return copysign(fma(q, t, base), a);
  }
}

// Sleef's sinh and cosh overflow a little early: where e^x does, e^x / 2 = e^(x/2) / 2 * e^(x/2) may still be finite.
template <class T> constexpr T exp_overflows = sizeof(T) == 4 ? T(88) : T(709);
template <class T, int W> PV_FN Vec<T, W> half_exp(const Vec<T, W>& a) {
  const auto half = splat<W>(T(0.5)), root = exp(mul(a, half));
  return mul(mul(root, half), root);
}
template <class T, int W> PV_FN Vec<T, W> cosh(const Vec<T, W>& a) {
  const auto size = abs(a);
  return where(gt(size, splat<W>(exp_overflows<T>)), half_exp(size), cosh_sleef(a));
}
template <class T, int W> PV_FN Vec<T, W> sinh(const Vec<T, W>& a) {
  const auto size = abs(a);
  return where(gt(size, splat<W>(exp_overflows<T>)), copysign(half_exp(size), a), sinh_sleef(a));
}

template <class T, int W> PV_FN Vec<T, W> rsqrt(const Vec<T, W>& a) { return reciprocal(sqrt(a)); }
template <class T, int W> PV_FN Vec<T, W> sigmoid(const Vec<T, W>& a) {
  const auto one = splat<W>(T(1));
  return div(one, add(one, exp(neg(a))));
}

template <class T, int W> PV_FN Vec<T, W> truncdiv(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (is_float<T>) return trunc(div(a, b));
  else return lanewise([](T x, T y) PV_INLINE { return truncdiv(x, y); }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> remainder(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (is_float<T>) {
    const auto zero = splat<W>(T(0)), rest = fmod(a, b);
    const auto wrong = bitwise_and(ne(rest, zero), ne(lt(b, zero), lt(rest, zero)));
    return where(wrong, add(rest, b), rest);
  } else {
    return lanewise([](T x, T y) PV_INLINE { return remainder(x, y); }, a, b);
  }
}
template <class T, int W> PV_FN Vec<T, W> floordiv(const Vec<T, W>& a, const Vec<T, W>& b) {
  return lanewise([](T x, T y) PV_INLINE { return floordiv(x, y); }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> shl(const Vec<T, W>& a, const Vec<T, W>& b) {
  return lanewise([](T x, T y) PV_INLINE { return shl(x, y); }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> shr(const Vec<T, W>& a, const Vec<T, W>& b) {
  return lanewise([](T x, T y) PV_INLINE { return shr(x, y); }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> round_bf16(const Vec<T, W>& a) {
  return cast<T>(widen<bf16, W>(shrink<bf16, W>(cast<float>(a))));
}
template <class T, int W> PV_FN Vec<T, W> round_f16(const Vec<T, W>& a) {
  return cast<T>(widen<f16, W>(shrink<f16, W>(cast<float>(a))));
}

// ------------------------------------------------------------------------------------------------ index checks

// Why a kernel failed: which of its checks, and the index that names nothing in a dimension of `size`.
struct IndexFailure {
  int64_t check, index, size;
};

// What a kernel returns for it: an address that is good until the next failure of this thread.
[[gnu::cold, gnu::noinline]] inline int64_t index_failure(int64_t check, int64_t index, int64_t size) {
  static thread_local IndexFailure failure;
  failure = {check, index, size};
  return reinterpret_cast<int64_t>(&failure);
}

// The index that `a` names in a dimension of `size`, or 0 and a failed `status` when it names none.
PV_FN int64_t check_index(int64_t a, int64_t size, bool wrap, int64_t& status, int64_t check) {
  const int64_t index = wrap && a < 0 ? a + size : a;
  if (index >= 0 && index < size) return index;
  if (status == 0) status = index_failure(check, a, size);
  return 0;
}
template <int W, class N>
PV_FN Vec<int64_t, W> check_index(const Vec<int64_t, W>& a, int64_t size, bool wrap, int64_t& status, int64_t check,
                                  const N& n) {
  auto lane = lanes(a);
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) lane.lane[k] = check_index(lane[k], size, wrap, status, check);
  for (int k = int(used); k < W; k++) lane.lane[k] = 0;
  return from_lanes(lane);
}

// ------------------------------------------------------------------------------------------------ loops

PV_FN int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// body(n, i) for i = lo, lo + W, ...: whole steps with n = All<W>, then what is left with n = Some<W>.
template <int W, class F> PV_FN void steps(int64_t lo, int64_t hi, F body) {
  int64_t i = lo;
  for (; i + W <= hi; i += W) body(All<W>(), i);
  if (i < hi) body(Some<W>(hi - i), i);
}
// The same where W divides the number of iterations.
template <int W, class F> PV_FN void whole_steps(int64_t lo, int64_t hi, F body) {
  for (int64_t i = lo; i < hi; i += W) body(All<W>(), i);
}

// ------------------------------------------------------------------------------------------------ reductions

// A reduction joins partial results with `join` and starts from `identity`; `lanes` joins raw registers.
struct Sum {
  template <class T> static constexpr T identity = T(0);
  template <class V> PV_FN static V join(const V& a, const V& b) { return add(a, b); }
  template <class T, int L> PV_FN static Reg<T, L> lanes(Reg<T, L> a, Reg<T, L> b) {
    return (Reg<T, L>)(wrapping<T, L>(a) + wrapping<T, L>(b));
  }
};
struct Prod {
  template <class T> static constexpr T identity = T(1);
  template <class V> PV_FN static V join(const V& a, const V& b) { return mul(a, b); }
  template <class T, int L> PV_FN static Reg<T, L> lanes(Reg<T, L> a, Reg<T, L> b) {
    return (Reg<T, L>)(wrapping<T, L>(a) * wrapping<T, L>(b));
  }
};
struct Max {
  template <class T> static constexpr T identity = is_float<T> ? -inf<T> : std::numeric_limits<T>::lowest();
  template <class V> PV_FN static V join(const V& a, const V& b) { return maximum(a, b); }
  template <class T, int L> PV_FN static Reg<T, L> lanes(Reg<T, L> a, Reg<T, L> b) {
    return (a > b) | (a != a) ? a : b;
  }
};
struct Min {
  template <class T> static constexpr T identity = is_float<T> ? inf<T> : std::numeric_limits<T>::max();
  template <class V> PV_FN static V join(const V& a, const V& b) { return minimum(a, b); }
  template <class T, int L> PV_FN static Reg<T, L> lanes(Reg<T, L> a, Reg<T, L> b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Any {
  template <class T> static constexpr T identity = false;
  template <class V> PV_FN static V join(const V& a, const V& b) { return bitwise_or(a, b); }
};
struct Every {
  template <class T> static constexpr T identity = true;
  template <class V> PV_FN static V join(const V& a, const V& b) { return bitwise_and(a, b); }
};

template <class V> struct Fill { PV_FN static V with(V a) { return a; } };
template <class T, int W> struct Fill<Vec<T, W>> { PV_FN static Vec<T, W> with(T a) { return splat<W>(a); } };

// One running result per lane of V.
template <class Op, class V> struct Acc {
  V sofar = Fill<V>::with(Op::template identity<Lane<V>>);
  PV_FN void add(const V& a) { sofar = Op::join(sofar, a); }
  template <int W> PV_FN void add(const V& a, All<W>) { add(a); }
  template <int W> PV_FN void add(const V& a, const Some<W>& n) { sofar = where(n.mask, Op::join(sofar, a), sofar); }
  PV_FN V value() const { return sofar; }
};

// The position of the greatest (least) element, the first of equals; a NaN counts as greater (less) than any number.
template <class T> struct Argmax {
  T best = T();
  int64_t at = -1;
  PV_FN void add(T a, int64_t i) {
    if (at < 0 || a > best || (a != a && best == best)) best = a, at = i;
  }
  PV_FN int64_t value() const { return at; }
};
template <class T> struct Argmin {
  T best = T();
  int64_t at = -1;
  PV_FN void add(T a, int64_t i) {
    if (at < 0 || a < best || (a != a && best == best)) best = a, at = i;
  }
  PV_FN int64_t value() const { return at; }
};

// The closed blocks of a long sum, added pairwise: level k is free or holds the sum of 2^k blocks, so that the error
// grows with the logarithm of their number. The accumulator stays apart from it, in a register.
template <class V> struct Blocks {
  static constexpr int LEVELS = 40;
  V level[LEVELS];
  uint64_t count = 0;
  void push(V block) {
    int k = 0;
    for (; count >> k & 1; k++) block = pv::add(level[k], block);
    level[k] = block;
    count++;
  }
  PV_FN void close(Acc<Sum, V>& acc) {
    push(acc.value());
    acc = Acc<Sum, V>();
  }
  V value() const {
    V all = Fill<V>::with(Lane<V>(0));
    for (int k = 0; k < LEVELS; k++)
      if (count >> k & 1) all = pv::add(all, level[k]);
    return all;
  }
};

// All lanes of a joined into one: register with register, then the halves of what is left.
template <class Op, class T, int L> PV_FN T fold(Reg<T, L> a) {
  if constexpr (L == 1) return a[0];
  else return fold<Op, T, L / 2>(Op::template lanes<T, L / 2>(piece<0, L / 2, T, L>(a), piece<L / 2, L / 2, T, L>(a)));
}
template <class Op, int FROM, int N, class T, int W> PV_FN auto fold_registers(const Vec<T, W>& a) {
  if constexpr (N == 1) {
    return a.r[FROM];
  } else {
    const auto low = fold_registers<Op, FROM, N / 2>(a), high = fold_registers<Op, FROM + N / 2, N / 2>(a);
    return Op::template lanes<T, Vec<T, W>::lanes>(low, high);
  }
}
template <class Op, class T, int W> PV_FN T total(const Vec<T, W>& a) {
  if constexpr (std::is_same_v<T, bool>) {
    const auto lane = lanes(a);
    T result = lane[0];
    for (int k = 1; k < W; k++) result = Op::join(result, lane[k]);
    return result;
  } else {
    return fold<Op, T, Vec<T, W>::lanes>(fold_registers<Op, 0, Vec<T, W>::count>(a));
  }
}

// The same for each lane of a vector. Positions are I, wide enough for the last one; the position of lane 0 is given.
// Once the first elements are seen few are better than all before, so the common step is a comparison and a branch.
template <class Op, class T, int W, class I> struct Arg {
  static constexpr bool greatest = std::is_same_v<Op, Max>;
  Vec<T, W> best = splat<W>(Op::template identity<T>);
  Vec<I, W> at = splat<W>(I(0));  // where the identity is the best, the first element is the first of equals
  PV_FN Vec<bool, W> better(const Vec<T, W>& a) const {  // or one of the two is NaN
    return greatest ? compare<NOT_LE>(a, best) : compare<NOT_LE>(best, a);
  }
  PV_FN void take(const Vec<bool, W>& better, const Vec<T, W>& a, int64_t i) {
    const auto now = is_float<T> ? bitwise_and(better, compare<EQ>(best, best)) : better;
    best = where(now, a, best);
    at = where(now, splat<W>(I(i)), at);
  }
  PV_FN void add(const Vec<T, W>& a, int64_t i, All<W> = {}) {
    const auto m = better(a);
    if (any(m)) take(m, a, i);
  }
  PV_FN void add(const Vec<T, W>& a, int64_t i, const Some<W>& n) { take(both(better(a), n), a, i); }
  PV_FN Vec<int64_t, W> value() const { return cast<int64_t>(at); }
  // The first of all lanes, where neighbouring lanes have neighbouring positions.
  PV_FN int64_t first() const {
    const T winner = total<Op>(best);
    const auto same = winner == winner ? compare<EQ>(best, splat<W>(winner)) : compare<NE>(best, best);
    const auto place = add_lanes(at);
    return total<Min>(where(same, place, splat<W>(std::numeric_limits<I>::max())));
  }
  PV_FN static Vec<I, W> add_lanes(const Vec<I, W>& a) { return pv::add(a, cast<I>(iota<W>(0, 1))); }
};

}  // namespace pv
