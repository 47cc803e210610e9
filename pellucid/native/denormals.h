// Denormal numbers, which some instructions of some processors take many times as long for.
#pragma once

#include <immintrin.h>

#include "openmp_abi.h"

namespace pellucid {

// From now on the threads of the calling thread's team take denormal numbers for zeros, or no longer do.
inline void flush_denormals(bool on) {
  constexpr unsigned kFlush = 0x8040;  // of MXCSR: results to zero, operands as zeros
  GOMP_parallel(
      [](void* wanted) {
        unsigned rest = _mm_getcsr() & ~kFlush;
        _mm_setcsr(*static_cast<bool*>(wanted) ? rest | kFlush : rest);
      },
      &on, 0, 0);
}

}  // namespace pellucid
