// A sample of memory: one line of the cache in every `turns`-th page, from page `turn` on, so that what was replaced as a
// whole is noticed at the cost of some nanoseconds for each of these pages. Fewer than `turns` pages are looked at from
// the first one on.
#pragma once

#include <cstdint>
#include <cstring>

namespace pellucid {

constexpr int64_t kPage = 4096, kLine = 64;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio: multiples of it are spread evenly

inline int64_t first_sampled(int64_t bytes, int64_t turn) { return turn * kPage < bytes ? turn * kPage : 0; }

inline uint64_t fingerprint(const char* at, int64_t bytes, int64_t turn, int64_t turns, uint64_t hash) {
  const int64_t step = turns * kPage, ahead = 16 * step, first = first_sampled(bytes, turn);
  for (int64_t from = first; from < bytes; from += step) {
    if (from + ahead < bytes) __builtin_prefetch(at + from + ahead);  // pages are too far apart for the processor's own
    uint64_t words[kLine / sizeof(uint64_t)] = {};
    std::memcpy(words, at + from, size_t(bytes - from < kLine ? bytes - from : kLine));
    uint64_t mixed = 0;
    for (uint64_t word : words) mixed = (mixed + word) * kOdd;
    hash = (hash ^ mixed ^ (mixed >> 32)) * kOdd;
  }
  return hash;
}

// The same of `count` pieces. Most are short: the first lines of those that come later are asked for ahead.
inline uint64_t fingerprint_all(
    const int64_t* addresses, const int64_t* sizes, int64_t count, int64_t turn, int64_t turns) {
  constexpr int64_t AHEAD = 16;
  const auto at = [&](int64_t k) { return reinterpret_cast<const char*>(addresses[k]); };
  uint64_t hash = 0;
  for (int64_t k = 0; k < count; k++) {
    if (k + AHEAD < count) __builtin_prefetch(at(k + AHEAD) + first_sampled(sizes[k + AHEAD], turn));
    hash = fingerprint(at(k), sizes[k], turn, turns, hash);
  }
  return hash;
}

}  // namespace pellucid
