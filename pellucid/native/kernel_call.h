// The call of a kernel: divides its iterations among threads.
#pragma once

#include <atomic>

#include "host.h"
#include "stack.h"

namespace pellucid {
namespace {

// A failed index check: the kernel returns its address. Created by `index_failure` in kernel/loops.h.
struct IndexFailure {
  int64_t check, index, size;
};

void fill_in(std::string& message, const std::string& name, int64_t value) {
  message.replace(message.find(name), name.size(), std::to_string(value));
}

struct Share {
  const KernelCall& call;
  const Variant& variant;
  void* const* parameters;
  ShareTime* times;  // by thread; null if no times are taken
  std::atomic<int64_t> status{0};
};

// Runs some iterations of a kernel, on a stack that is large enough.
int64_t run_iterations(const Variant& variant, void* const* parameters, const int64_t* symbols, int64_t begin,
                       int64_t end) {
  int64_t status = 0;
  with_stack([&] { status = variant.function(parameters, symbols, begin, end); });
  return status;
}

void run_share(void* data) {
  Share& share = *static_cast<Share*>(data);
  int64_t n = omp_get_num_threads(), i = omp_get_thread_num(), extent = share.variant.extent;
  int64_t status =
      run_iterations(share.variant, share.parameters, share.call.symbols.data(), extent * i / n, extent * (i + 1) / n);
  if (status) share.status = status;
}

void run_timed_share(void* data) {
  ShareTime& time = static_cast<Share*>(data)->times[omp_get_thread_num()];
  time.begin = ticks();
  run_share(data);
  time.end = ticks();
  time.thread = thread_number();
}

int64_t torch_threads() {
  if (single_threaded || omp_in_parallel()) return 1;
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads;
}

// times: of the run, or null.
int64_t run_variant(const KernelCall& call, const Variant& variant, Frame& frame, RunTimes* times) {
  if (variant.extent <= 0) return 0;
  int64_t threads = variant.extent / variant.grain;
  if (threads > 1) threads = std::min(threads, torch_threads());
  if (threads <= 1) return run_iterations(variant, frame.parameters.data(), call.symbols.data(), 0, variant.extent);
  Share share{call, variant, frame.parameters.data(), times ? times->shares(threads) : nullptr};
  GOMP_parallel(times ? run_timed_share : run_share, &share, static_cast<unsigned>(threads), 0);
  if (times) times->save_shares();
  return share.status;
}

// Runs a call of a trial. It is measured if it has the number of threads of the trial, no thread waits for another one
// that has no core, and no other thread of the process is measuring the same trial.
[[gnu::noinline]] int64_t run_trial(const KernelCall& call, Frame& frame, RunTimes* times,
                                    std::atomic<bool>& unreported) {
  Trial& trial = *call.trial;
  if (!trial.open()) return run_variant(call, trial.best(), frame, times);
  std::unique_lock<std::mutex> lock(trial.mutex, std::defer_lock);
  bool steady = torch_threads() == trial.threads && (trial.threads == 1 || !contention.contended());
  bool measured = steady && !times && lock.try_lock();
  if (!measured || !trial.open()) return run_variant(call, trial.best(), frame, times);
  const Variant& variant = trial.next(call.site);
  int64_t begin = nanoseconds();
  int64_t status = run_variant(call, variant, frame, times);
  if (status == 0 && trial.record(call.site, nanoseconds() - begin)) unreported = true;
  return status;
}

// unreported: set when a trial ends.
int64_t run_kernel(const KernelCall& call, Frame& frame, RunTimes* times, std::atomic<bool>& unreported) {
  for (size_t i = 0; i < call.slots.size(); i++)
    frame.parameters[i] = static_cast<char*>(frame.pointer[call.slots[i]]) + call.offsets[i];
  if (call.trial) [[unlikely]] return run_trial(call, frame, times, unreported);
  return run_variant(call, call.variant, frame, times);
}

}  // namespace
}  // namespace pellucid
