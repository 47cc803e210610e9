// Memory of the runtime: blocks from the system, the pool that tensors handed to the caller come from, and the
// arenas that hold temporaries. None of it goes back to the system between calls: faulting fresh pages in costs
// several times the work done on them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "words.h"

namespace pellucid {

constexpr int64_t kMapped = 64 << 10;      // blocks from this size on are mapped, smaller ones come from malloc
constexpr int64_t kHugePage = 2 << 20;

// There in a process that AddressSanitizer watches. Then every block is exactly as large as asked for, comes from malloc
// and goes back at once, or what is written beyond its end would be seen by nobody.
extern "C" void __asan_poison_memory_region(void const volatile*, size_t) __attribute__((weak));
inline const bool kWatched = __asan_poison_memory_region != nullptr;

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A block of n bytes from the system, or null. From two huge pages on it starts at a huge page and asks for them:
// 512 times fewer faults at the first touch, and fewer TLB misses ever after.
inline void* system_alloc(int64_t n) {
  if (n < kMapped) return std::aligned_alloc(kAlignment, round_up(n, kAlignment));
  int64_t slack = n >= 2 * kHugePage ? kHugePage : 0;
  void* raw = mmap(nullptr, n + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  if (!slack) return raw;
  char* start = static_cast<char*>(raw);
  char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(start), kHugePage));
  if (aligned > start) munmap(start, aligned - start);
  char* end = start + n + slack;
  char* used = aligned + round_up(n, 4096);
  if (end > used) munmap(used, end - used);
  madvise(aligned, n, MADV_HUGEPAGE);
  return aligned;
}

inline void system_free(void* block, int64_t n) {
  if (n < kMapped) std::free(block);
  else munmap(block, n);
}

// Size classes: multiples of 64 bytes up to 512, then eight to each power of two, so that at most 1/8 is wasted.
inline int size_class(int64_t n) {
  if (n <= 512) return static_cast<int>((std::max<int64_t>(n, 1) - 1) / 64);
  int log = 63 - __builtin_clzll(n - 1);  // 2^log < n <= 2^(log + 1), up to the edges
  return (log - 9) * 8 + static_cast<int>((n - 1) >> (log - 3));
}

inline int64_t class_bytes(int cls) {
  if (cls < 8) return (cls + 1) * 64;
  int64_t step = int64_t{1} << (cls / 8 - 1 + 6);
  return (cls % 8 + 9) * step;
}

struct PoolStats {
  int64_t in_use, cached, limit, hits, misses;
};

// A caching allocator: free blocks wait, by size class, for the next request of that class. Bytes cached are
// bounded; what has not been asked for the longest is given back first. Any thread may call it.
class Pool {
 public:
  // A block of at least n bytes, or null when the system has none. n == 0 gives a valid address to read nothing at.
  void* alloc(int64_t n) {
    if (n == 0) return nothing_;
    if (kWatched) return exactly(n);
    int cls = size_class(n);
    std::lock_guard<std::mutex> lock(mutex);
    Class& c = classes_[cls];
    c.last_use = ++clock_;
    int64_t bytes = class_bytes(cls);
    stats_.in_use += bytes;
    if (!c.free.empty()) {
      void* block = c.free.back();
      c.free.pop_back();
      stats_.cached -= bytes;
      stats_.hits++;
      return block;
    }
    stats_.misses++;
    void* block = system_alloc(bytes);
    if (!block) {  // what is cached in other classes may be all that is left
      evict(0);
      block = system_alloc(bytes);
    }
    if (!block) stats_.in_use -= bytes;
    return block;
  }

  void free(void* block, int64_t n) {
    if (block == nothing_) return;
    if (kWatched) return std::free(block);
    int cls = size_class(n);
    int64_t bytes = class_bytes(cls);
    std::lock_guard<std::mutex> lock(mutex);
    stats_.in_use -= bytes;
    if (bytes > stats_.limit) return system_free(block, bytes);
    if (stats_.cached + bytes > stats_.limit) evict(stats_.limit - bytes);
    classes_[cls].free.push_back(block);
    stats_.cached += bytes;
  }

  // Give back cached blocks until at most `keep` bytes are cached; returns the bytes given back.
  int64_t trim(int64_t keep) {
    std::lock_guard<std::mutex> lock(mutex);
    return evict(keep);
  }

  void set_limit(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    stats_.limit = bytes;
    evict(bytes);
  }

  PoolStats stats() {
    std::lock_guard<std::mutex> lock(mutex);
    return stats_;
  }

  std::mutex mutex;  // public: a fork must not happen while another thread holds it

 private:
  static void* exactly(int64_t n) {
    void* block = nullptr;
    return posix_memalign(&block, kAlignment, n) == 0 ? block : nullptr;
  }

  struct Class {
    std::vector<void*> free;  // the most recently freed, and so the warmest, at the back
    uint64_t last_use = 0;
  };

  int64_t evict(int64_t keep) {
    int64_t before = stats_.cached;
    while (stats_.cached > keep) {
      int oldest = -1;
      for (int cls = 0; cls < kClasses; cls++)
        if (!classes_[cls].free.empty() && (oldest < 0 || classes_[cls].last_use < classes_[oldest].last_use))
          oldest = cls;
      if (oldest < 0) break;
      int64_t bytes = class_bytes(oldest);
      std::vector<void*>& free = classes_[oldest].free;
      system_free(free.front(), bytes);
      free.erase(free.begin());
      stats_.cached -= bytes;
    }
    return before - stats_.cached;
  }

  static constexpr int kClasses = 8 * 48;
  Class classes_[kClasses];
  PoolStats stats_{};
  uint64_t clock_ = 0;
  alignas(kAlignment) char nothing_[kAlignment] = {};
};

// Scratch memory for one run at a time. An arena is never destroyed, so that a pointer to it identifies it for
// good; its memory may move when it grows.
struct Arena {
  char* base = nullptr;
  int64_t bytes = 0;
};

// All arenas of the process: as many as runs were ever in progress at once, each as large as its largest run.
class Arenas {
 public:
  // An arena of at least n bytes that nobody else uses until it is released, or null when there is no memory.
  Arena* acquire(int64_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    Arena* arena = nullptr;
    for (size_t i = free_.size(); i-- > 0 && !arena;)
      if (free_[i]->bytes >= n) arena = take(i);
    if (arena) return arena;
    arena = free_.empty() ? new Arena : take(free_.size() - 1);
    if (grow(arena, n)) return arena;
    free_.push_back(arena);
    return nullptr;
  }

  void release(Arena* arena) {
    std::lock_guard<std::mutex> lock(mutex);
    free_.push_back(arena);
  }

  // Give back the memory of all arenas that are not in use; returns the bytes given back.
  int64_t trim() {
    std::lock_guard<std::mutex> lock(mutex);
    int64_t before = bytes_;
    for (Arena* arena : free_) clear(arena);
    return before - bytes_;
  }

  int64_t bytes() {
    std::lock_guard<std::mutex> lock(mutex);
    return bytes_;
  }

  std::mutex mutex;

 private:
  Arena* take(size_t i) {
    Arena* arena = free_[i];
    free_.erase(free_.begin() + static_cast<int64_t>(i));
    return arena;
  }

  void clear(Arena* arena) {
    if (arena->base) system_free(arena->base, arena->bytes);
    bytes_ -= arena->bytes;
    *arena = Arena{};
  }

  bool grow(Arena* arena, int64_t n) {
    clear(arena);
    n = round_up(n, kMapped);
    arena->base = static_cast<char*>(system_alloc(n));
    if (!arena->base) return false;
    arena->bytes = n;
    bytes_ += n;
    return true;
  }

  std::vector<Arena*> free_;  // the most recently used at the back
  int64_t bytes_ = 0;
};

}  // namespace pellucid
