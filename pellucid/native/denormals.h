// Denormal numbers, with which some instructions of some processors take many times as long.
#pragma once

#include <immintrin.h>

#include "openmp_abi.h"

namespace pellucid {

// Makes the threads of the calling thread's team treat denormal numbers as zeros, or stop doing so.
inline void flush_denormals(bool on) {
  constexpr unsigned kFlush = 0x8040;  // of MXCSR: results to zero, operands as zeros
  GOMP_parallel(
      [](void* flush) {
        unsigned rest = _mm_getcsr() & ~kFlush;
        _mm_setcsr(*static_cast<bool*>(flush) ? rest | kFlush : rest);
      },
      &on, 0, 0);
}

}  // namespace pellucid
