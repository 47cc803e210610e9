// Measurements for the machine model: loops that only move bytes or compute, on one thread or on all threads of
// PyTorch's team. Times are nanoseconds of one pass.
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "openmp_abi.h"

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
typedef int64_t Words __attribute__((vector_size(kBytes), may_alias));
typedef float Floats __attribute__((vector_size(kBytes)));
typedef double Doubles __attribute__((vector_size(kBytes)));

namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

// Keeps the compiler from removing the loops that computed `values`, which are not read otherwise. Their address is not
// taken, so they stay in registers.
template <typename T, int kCount>
void keep(const T (&values)[kCount]) {
  T total = values[0];
#pragma GCC unroll 16
  for (int k = 1; k < kCount; ++k) total += values[k];
  asm volatile("" : : "m"(total));
}

struct Pass {
  Words* memory;
  int64_t vectors;  // of all threads
  int64_t repeats;
};

// A thread's share of the vectors, a multiple of `step`.
int64_t share(const Pass& pass, int64_t step) { return pass.vectors / omp_get_num_threads() / step * step; }

void read_pass(void* data) {
  auto& pass = *static_cast<Pass*>(data);
  int64_t count = share(pass, 8);
  const Words* from = pass.memory + count * omp_get_thread_num();
  Words sums[8] = {};
  for (int64_t n = 0; n < pass.repeats; ++n) {
    for (int64_t i = 0; i < count; i += 8)
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) sums[k] ^= from[i + k];
    asm volatile("" : : : "memory");
  }
  keep(sums);
}

void copy_pass(void* data) {
  auto& pass = *static_cast<Pass*>(data);
  int64_t count = share(pass, 8) / 2;
  Words* from = pass.memory + 2 * count * omp_get_thread_num();
  Words* to = from + count;
  for (int64_t n = 0; n < pass.repeats; ++n) {
    for (int64_t i = 0; i < count; i += 4)
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) to[i + k] = from[i + k] + 1;  // vector code, as in kernels: not memcpy
    asm volatile("" : : : "memory");
  }
}

// Chains of multiply-adds, enough of them to hide their latency.
template <typename T>
void multiply_add(int64_t repeats) {
  constexpr int kChains = 12;
  T sums[kChains], factor = T{} + 0.5f, term = T{} + 0.25f;
#pragma GCC unroll 12
  for (int k = 0; k < kChains; ++k) sums[k] = term;
  asm("" : "+x"(factor), "+x"(term));  // unknown to the compiler
  for (int64_t n = 0; n < repeats; ++n) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) sums[k] = sums[k] * factor + term;
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) asm("" : "+x"(sums[k]));
  }
  keep(sums);
}

void f32_pass(void* data) { multiply_add<Floats>(static_cast<Pass*>(data)->repeats); }
void f64_pass(void* data) { multiply_add<Doubles>(static_cast<Pass*>(data)->repeats); }

#if defined(__AMX_BF16__)
void bf16_pass(void* data) {
  struct alignas(64) {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < 8; i++) shape.rows[i] = 16, shape.row_bytes[i] = 64;
  asm volatile("ldtilecfg %0" : : "m"(shape));
  for (int64_t n = 0; n < static_cast<Pass*>(data)->repeats; ++n) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
constexpr int kBf16Flops = 4 * 2 * 16 * 16 * 32;
#elif defined(__AVX512BF16__)
void bf16_pass(void* data) {
  constexpr int kChains = 12;
  __m512 sums[kChains] = {};
  __m512bh factor{}, term{};
  asm("" : "+x"(factor), "+x"(term));
  for (int64_t n = 0; n < static_cast<Pass*>(data)->repeats; ++n) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) sums[k] = _mm512_dpbf16_ps(sums[k], factor, term);
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) asm("" : "+x"(sums[k]));
  }
  keep(sums);
}
constexpr int kBf16Flops = 12 * 2 * kBytes / 2;
#else
void bf16_pass(void* data) { f32_pass(data); }  // without bf16 instructions it is widened
constexpr int kBf16Flops = 12 * 2 * kBytes / 4;
#endif

void empty_pass(void*) {}

double timed(void (*body)(void*), Pass& pass, int threads) {
  double start = now();
  if (threads == 1) {
    GOMP_parallel(body, &pass, 1, 0);
  } else {
    GOMP_parallel(body, &pass, 0, 0);  // the team of the kernels
  }
  return now() - start;
}

}  // namespace

extern "C" {

// Nanoseconds of one pass over `bytes` of `memory`, read only; threads: 1, or 0 for all.
double pellucid_read(void* memory, int64_t bytes, int64_t repeats, int threads) {
  Pass pass{static_cast<Words*>(memory), bytes / kBytes, repeats};
  return timed(read_pass, pass, threads) / static_cast<double>(repeats);
}

// Nanoseconds of one pass that copies one half of `memory` into the other.
double pellucid_copy(void* memory, int64_t bytes, int64_t repeats, int threads) {
  Pass pass{static_cast<Words*>(memory), bytes / kBytes, repeats};
  return timed(copy_pass, pass, threads) / static_cast<double>(repeats);
}

// Floating point operations per nanosecond and thread. type: bytes of an element, 4, 8 or 2.
double pellucid_flops(int type, int64_t repeats, int threads) {
  Pass pass{nullptr, 0, repeats};
  auto body = type == 8 ? f64_pass : type == 2 ? bf16_pass : f32_pass;
  int each = type == 2 ? kBf16Flops : 12 * 2 * kBytes / type;
  return each * static_cast<double>(repeats) / timed(body, pass, threads);
}

// Nanoseconds of an empty parallel region of all threads.
double pellucid_barrier(int64_t repeats) {
  Pass pass{};
  double start = now();
  for (int64_t n = 0; n < repeats; ++n) GOMP_parallel(empty_pass, &pass, 0, 0);
  return (now() - start) / static_cast<double>(repeats);
}

// Nanoseconds to map and first write a page, averaged over `pages` of them; -1 without memory.
double pellucid_page(int64_t pages) {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), bytes = static_cast<size_t>(pages) * page;
  double start = now();
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return -1;
  for (size_t at = 0; at < bytes; at += page) static_cast<volatile char*>(memory)[at] = 1;
  double taken = now() - start;
  munmap(memory, bytes);
  return taken / static_cast<double>(pages);
}

// Nanoseconds of a load from a random line whose address depends on the previous load.
double pellucid_latency(const void* memory, int64_t bytes, int64_t loads) {
  constexpr int64_t kLine = 64;
  auto* words = static_cast<const char*>(memory);
  uint64_t lines = static_cast<uint64_t>(bytes / kLine), at = 1, none = 0;
  asm("" : "+r"(none));  // unknown to the compiler
  double start = now();
  for (int64_t n = 0; n < loads; ++n) {
    at = at * 6364136223846793005u + 1442695040888963407u;
    at ^= *reinterpret_cast<const volatile uint64_t*>(words + (at >> 20) % lines * kLine) & none;
  }
  asm volatile("" : : "r"(at));
  return (now() - start) / static_cast<double>(loads);
}

// An empty kernel, to measure the cost of a call in a plan.
int64_t pellucid_nothing(void* const*, const int64_t*, int64_t, int64_t) { return 0; }
}
