// Memory of the runtime: blocks from the system, the pool for tensors that the caller gets, and the arenas for
// temporaries. None of it is returned to the system between calls: page faults of fresh pages cost several times the
// work done on them.
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

// Defined in a process with AddressSanitizer. Every block then has exactly the requested size, comes from malloc and is
// freed at once; otherwise writes past its end would not be detected.
extern "C" void __asan_poison_memory_region(void const volatile*, size_t) __attribute__((weak));
inline const bool kSanitized = __asan_poison_memory_region != nullptr;

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A block of n bytes from the system, or null. One of at least two huge pages is aligned to a huge page and requests
// huge pages: 512 times fewer page faults at the first touch, and fewer TLB misses.
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
  int log = 63 - __builtin_clzll(n - 1);  // 2^log < n <= 2^(log + 1)
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

// A caching allocator: free blocks are cached, by size class, for the next request of that class. The bytes cached are
// bounded; the least recently used class is evicted first. Any thread may call it.
class Pool {
 public:
  // A block of at least n bytes, or null if the system has none. For n == 0 a valid address that is never read.
  void* alloc(int64_t n) {
    if (n == 0) return empty_;
    if (kSanitized) return alloc_exactly(n);
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
    if (!block) {  // the cached blocks of other classes may be all that is left
      evict(0);
      block = system_alloc(bytes);
    }
    if (!block) stats_.in_use -= bytes;
    return block;
  }

  void free(void* block, int64_t n) {
    if (block == empty_) return;
    if (kSanitized) return std::free(block);
    int cls = size_class(n);
    int64_t bytes = class_bytes(cls);
    std::lock_guard<std::mutex> lock(mutex);
    stats_.in_use -= bytes;
    if (bytes > stats_.limit) return system_free(block, bytes);
    if (stats_.cached + bytes > stats_.limit) evict(stats_.limit - bytes);
    classes_[cls].free.push_back(block);
    stats_.cached += bytes;
  }

  // Frees cached blocks until at most `keep` bytes are cached; returns the bytes freed.
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
  static void* alloc_exactly(int64_t n) {
    void* block = nullptr;
    return posix_memalign(&block, kAlignment, n) == 0 ? block : nullptr;
  }

  struct Class {
    std::vector<void*> free;  // the most recently freed, likely in a cache, at the back
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
  alignas(kAlignment) char empty_[kAlignment] = {};
};

// Scratch memory for one run at a time. An arena is never destroyed, so that its address identifies it; its memory may
// move when it grows.
struct Arena {
  char* base = nullptr;
  int64_t bytes = 0;
};

// All arenas of the process: as many as the maximum of concurrent runs so far, each as large as its largest run.
class Arenas {
 public:
  // An arena of at least n bytes, for exclusive use until it is released, or null if there is no memory.
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

  // Frees the memory of all arenas that are not in use; returns the bytes freed.
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
