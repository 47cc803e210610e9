// A sample of memory: one line of the cache in each page, so that what was replaced as a whole is noticed at the cost of
// some nanoseconds a page.
#pragma once

#include <cstdint>
#include <cstring>

namespace pellucid {

inline uint64_t fingerprint(const char* at, int64_t bytes, uint64_t hash) {
  constexpr int64_t PAGE = 4096, LINE = 64, AHEAD = 16 * PAGE;
  constexpr uint64_t ODD = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio: multiples of it are spread evenly
  for (int64_t from = 0; from < bytes; from += PAGE) {
    if (from + AHEAD < bytes) __builtin_prefetch(at + from + AHEAD);  // pages are too far apart for the processor's own
    uint64_t words[LINE / sizeof(uint64_t)] = {};
    std::memcpy(words, at + from, size_t(bytes - from < LINE ? bytes - from : LINE));
    uint64_t mixed = 0;
    for (uint64_t word : words) mixed = (mixed + word) * ODD;
    hash = (hash ^ mixed ^ (mixed >> 32)) * ODD;
  }
  return hash;
}

}  // namespace pellucid
