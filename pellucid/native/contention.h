// Cores for which other processes compete. libgomp's threads wait for one another by spinning, about 3 ms before they
// sleep: fastest if each thread has a core, and very slow if not, because a spinning thread then takes the core from
// the one that it waits for. libgomp spins 3000 times less while it manages more threads than there are cores
// (its manual, GOMP_SPINCOUNT). So while there is contention we keep a second team of sleeping threads.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>

#include "openmp_abi.h"

namespace pellucid {

// A team of sleeping threads, just large enough that with the calling thread's team there are more threads than cores.
class SleepingTeam {
 public:
  bool exists() const { return exists_.load(std::memory_order_relaxed); }

  void start() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (exists_) return;
    leave_ = false;
    cpu_set_t cores;
    int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    size_ = std::max(2, count - omp_get_max_threads() + 2);
    exists_ = pthread_create(&thread_, nullptr, live, this) == 0;
  }

  // Returns when its threads have ended.
  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!exists_) return;
    {
      std::lock_guard<std::mutex> wake(sleep_);
      leave_ = true;
    }
    woken_.notify_one();
    pthread_join(thread_, nullptr);
    exists_ = false;
  }

 private:
  static void* live(void* self) {
    auto& team = *static_cast<SleepingTeam*>(self);
    GOMP_parallel([](void*) {}, nullptr, static_cast<unsigned>(team.size_), 0);
    std::unique_lock<std::mutex> lock(team.sleep_);
    team.woken_.wait(lock, [&] { return team.leave_; });
    return nullptr;  // libgomp ends the team with the thread that created it
  }

  std::mutex mutex_, sleep_;
  std::condition_variable woken_;
  pthread_t thread_;
  std::atomic<bool> exists_ = false;
  bool leave_ = false;
  int size_ = 0;
};

// Measures how long the calling thread waits for a core, and keeps the sleeping team while that is long.
class Contention {
 public:
  // Called at the start of each run: a few nanoseconds, and some microseconds twenty times a second.
  void observe() {
    thread_local Sample last;
    int64_t now = milliseconds();
    if (now - last.at < kWindow) [[likely]] return;
    Sample next = sample(now);
    int64_t ran = next.ran - last.ran, waited = next.waited - last.waited;
    bool known = last.at != 0 && next.ran >= 0;
    if (known && ran + waited < kMinNanoseconds) return;  // too short to judge: the window continues
    last = next;
    if (known) weigh(ran, waited);
  }

  // Starts or stops the sleeping team. ran, waited: nanoseconds on a core, and waiting for one.
  void weigh(int64_t ran, int64_t waited) {
    double share = static_cast<double>(waited) / static_cast<double>(ran + waited);
    if (share > kCalm) calm_ = 0;
    if (share > kContended) team_.start();
    else if (share <= kCalm && team_.exists() && ++calm_ >= kCalmWindows) team_.stop();
  }

  bool contended() const { return team_.exists(); }

  // Stops the sleeping team, before a fork, which copies no threads.
  void end() { team_.stop(); }

 private:
  static constexpr int64_t kWindow = 50;                      // milliseconds between two samples
  static constexpr int64_t kMinNanoseconds = 20'000'000;      // of running and waiting, for a meaningful share
  static constexpr double kContended = 0.15, kCalm = 0.05;    // share of the time in which the thread waited for a core
  static constexpr int kCalmWindows = 4;

  struct Sample {
    int64_t at = 0, ran = 0, waited = 0;  // milliseconds; nanoseconds on a core, and ready for one but without it
  };

  static int64_t milliseconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return time.tv_sec * 1000 + time.tv_nsec / 1'000'000;
  }

  // `ran` is -1 where the kernel does not report it.
  static Sample sample(int64_t now) {
    Sample out{now, -1, -1};
    char text[96] = "";
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return out;
    if (read(file, text, sizeof text - 1) > 0) {
      long long ran, waited;
      if (std::sscanf(text, "%lld %lld", &ran, &waited) == 2) out.ran = ran, out.waited = waited;
    }
    close(file);
    return out;
  }

  SleepingTeam team_;
  std::atomic<int> calm_ = 0;
};

}  // namespace pellucid
