// A sample of memory: one line of the cache in every `turns`-th page, from page `turn` on, so that what was replaced as a
// whole is noticed at the cost of some nanoseconds for each of these pages. Fewer than `turns` pages are looked at from
// the first one on.
#pragma once

#include <cstdint>
#include <cstring>

namespace pellucid {

inline uint64_t fingerprint(const char* at, int64_t bytes, int64_t turn, int64_t turns, uint64_t hash) {
  constexpr int64_t PAGE = 4096, LINE = 64;
  const int64_t step = turns * PAGE, ahead = 16 * step, first = turn * PAGE < bytes ? turn * PAGE : 0;
  constexpr uint64_t ODD = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio: multiples of it are spread evenly
  for (int64_t from = first; from < bytes; from += step) {
    if (from + ahead < bytes) __builtin_prefetch(at + from + ahead);  // pages are too far apart for the processor's own
    uint64_t words[LINE / sizeof(uint64_t)] = {};
    std::memcpy(words, at + from, size_t(bytes - from < LINE ? bytes - from : LINE));
    uint64_t mixed = 0;
    for (uint64_t word : words) mixed = (mixed + word) * ODD;
    hash = (hash ^ mixed ^ (mixed >> 32)) * ODD;
  }
  return hash;
}

}  // namespace pellucid
