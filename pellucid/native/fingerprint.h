// Samples of memory: one cache line in every `turns`-th page, so that a replaced tensor is detected at the cost of some
// nanoseconds for each of these pages. Sample (turn, line) covers that line of every `turns`-th page from page `turn`;
// all samples together cover every byte. Memory of `turn` pages or fewer is sampled from its first page on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pellucid {

constexpr int64_t kPage = 4096, kLine = 64, kLines = kPage / kLine;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio: multiples of it are spread evenly

inline int64_t first_sampled(int64_t bytes, int64_t turn) { return turn * kPage < bytes ? turn * kPage : 0; }

// The offset of a line in the page at `from`; if the memory ends before that line, another one replaces it.
inline int64_t line_of(int64_t bytes, int64_t from, int64_t line) {
  const int64_t lines = (std::min(kPage, bytes - from) + kLine - 1) / kLine;
  return from + (line < lines ? line : line % lines) * kLine;
}

inline uint64_t with_line(uint64_t hash, const char* at, int64_t bytes) {
  uint64_t words[kLine / sizeof(uint64_t)] = {}, mixed = 0;
  std::memcpy(words, at, size_t(std::min(bytes, kLine)));
  for (uint64_t word : words) mixed = (mixed + word) * kOdd;
  return (hash ^ mixed ^ (mixed >> 32)) * kOdd;
}

inline uint64_t fingerprint(
    const char* at, int64_t bytes, int64_t turn, int64_t turns, int64_t line, uint64_t hash) {
  const int64_t step = turns * kPage, ahead = 16 * step;
  for (int64_t from = first_sampled(bytes, turn); from < bytes; from += step) {
    // Pages are too far apart for the processor's own prefetching.
    if (from + ahead < bytes) __builtin_prefetch(at + line_of(bytes, from + ahead, line));
    const int64_t offset = line_of(bytes, from, line);
    hash = with_line(hash, at + offset, bytes - offset);
  }
  return hash;
}

// Like `fingerprint`, of `count` blocks. Most are short, so the first lines of later ones are prefetched.
inline uint64_t fingerprint_all(
    const int64_t* addresses, const int64_t* sizes, int64_t count, int64_t turn, int64_t turns, int64_t line) {
  constexpr int64_t AHEAD = 16;
  const auto at = [&](int64_t k) { return reinterpret_cast<const char*>(addresses[k]); };
  uint64_t hash = 0;
  for (int64_t k = 0; k < count; k++) {
    if (k + AHEAD < count && sizes[k + AHEAD] > 0) {
      const int64_t bytes = sizes[k + AHEAD];
      __builtin_prefetch(at(k + AHEAD) + line_of(bytes, first_sampled(bytes, turn), line));
    }
    hash = fingerprint(at(k), sizes[k], turn, turns, line, hash);
  }
  return hash;
}

// All samples, hashes[turn][line], in one pass over the memory.
inline void every_fingerprint(
    const int64_t* addresses, const int64_t* sizes, int64_t count, int64_t turns, uint64_t* hashes) {
  std::fill_n(hashes, turns * kLines, 0);
  for (int64_t k = 0; k < count; k++) {
    const char* at = reinterpret_cast<const char*>(addresses[k]);
    const int64_t bytes = sizes[k];
    for (int64_t from = 0; from < bytes; from += kPage) {
      const auto add = [&](int64_t turn) {
        for (int64_t line = 0; line < kLines; line++) {
          const int64_t offset = line_of(bytes, from, line);
          uint64_t& hash = hashes[turn * kLines + line];
          hash = with_line(hash, at + offset, bytes - offset);
        }
      };
      add(from / kPage % turns);
      if (from == 0)
        for (int64_t turn = 1; turn < turns; turn++)
          if (first_sampled(bytes, turn) == 0) add(turn);
    }
  }
}

}  // namespace pellucid
