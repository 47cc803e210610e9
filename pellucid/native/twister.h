// The random numbers of ATen's CPU generator, many at a time: the Mersenne twister (Matsumoto and Nishimura, 1998).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pellucid {
namespace {

constexpr int64_t kWords = 624, kAhead = 397;

// Compiled for the widest registers of each processor: one library serves all of them.
#ifdef __clang__
#define PELLUCID_WIDEST  // target clones are not tested with clang
#else
#define PELLUCID_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

inline uint32_t twisted(uint32_t word, uint32_t after) {
  return ((word & 0x8000'0000) | (after & 0x7fff'ffff)) >> 1 ^ (0 - (after & 1) & 0x9908'b0df);
}

inline uint32_t tempered(uint32_t word) {
  word ^= word >> 11;
  word ^= word << 7 & 0x9d2c'5680;
  word ^= word << 15 & 0xefc6'0000;
  return word ^ word >> 18;
}

PELLUCID_WIDEST void twist(uint32_t* words) {
  for (int64_t i = 0; i < kWords - kAhead; i++) words[i] = words[i + kAhead] ^ twisted(words[i], words[i + 1]);
  for (int64_t i = kWords - kAhead; i < kWords - 1; i++)
    words[i] = words[i + kAhead - kWords] ^ twisted(words[i], words[i + 1]);
  words[kWords - 1] = words[kAhead - 1] ^ twisted(words[kWords - 1], words[0]);
}

// ATen combines two words to a number, the first as the upper half, and takes its lower 53 bits.
inline bool is_below(uint64_t limit, uint64_t upper, uint64_t lower) {
  return ((upper << 32 | lower) & ((uint64_t(1) << 53) - 1)) < limit;
}

// Which of `count` numbers of one state are below the limit. words: untempered.
PELLUCID_WIDEST void compare(const uint32_t* words, int64_t count, uint64_t limit, bool* out) {
  uint32_t ready[kWords];
  for (int64_t i = 0; i < 2 * count; i++) ready[i] = tempered(words[i]);
  for (int64_t i = 0; i < count; i++) {
    uint64_t pair;
    std::memcpy(&pair, ready + 2 * i, sizeof pair);
    out[i] = is_below(limit, pair & 0xffff'ffff, pair >> 32);
  }
}

class Twister {
 public:
  // state: the bytes of torch.Generator.get_state().
  explicit Twister(const char* state) {
    int32_t left;
    std::memcpy(&left, state + kLeftAt, sizeof left);
    std::memcpy(&next_, state + kNextAt, sizeof next_);
    if (left <= 1) next_ = kWords;
    for (int64_t i = 0; i < kWords; i++) std::memcpy(&words_[i], state + kWordsAt + 8 * i, sizeof words_[i]);
  }

  // Writes the state after the numbers drawn so far into these bytes.
  void save(char* state) const {
    const int32_t left = static_cast<int32_t>(kWords - next_ + 1);
    std::memcpy(state + kLeftAt, &left, sizeof left);
    std::memcpy(state + kNextAt, &next_, sizeof next_);
    for (int64_t i = 0; i < kWords; i++) {
      const uint64_t word = words_[i];
      std::memcpy(state + kWordsAt + 8 * i, &word, sizeof word);
    }
  }

  // Skips `words` words.
  void skip(int64_t words) {
    while (words > 0) {
      if (next_ == kWords) renew();
      const int64_t step = std::min(kWords - next_, words);
      next_ += step;
      words -= step;
    }
  }

  // Which of the next `count` numbers from 0 to 2^53 - 1 are below the limit.
  void below(uint64_t limit, bool* out, int64_t count) {
    while (count > 0) {
      if (next_ == kWords) renew();
      const int64_t step = std::min((kWords - next_) / 2, count);
      if (step > 0) {
        compare(words_ + next_, step, limit, out);
        next_ += 2 * step;
      } else {  // the upper half is the last word of a state
        const uint32_t upper = tempered(words_[next_]);
        renew();
        *out = is_below(limit, upper, tempered(words_[next_++]));
      }
      out += std::max<int64_t>(step, 1);
      count -= std::max<int64_t>(step, 1);
    }
  }

 private:
  static constexpr int64_t kLeftAt = 8, kNextAt = 16, kWordsAt = 24;  // offsets, after the seed

  void renew() {
    twist(words_);
    next_ = 0;
  }

  uint32_t words_[kWords];
  int64_t next_;  // index of the next word; `kWords`: all are used
};

#undef PELLUCID_WIDEST

}  // namespace
}  // namespace pellucid
