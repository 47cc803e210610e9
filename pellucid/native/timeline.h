// The begin and end of each call of a run, and of each thread's share of it. A run collects them, and adds them to the
// timeline at its end. Switched off, this costs a run one load and each call of its plan one branch.
//
// Reading the clock takes a sixth of the time of a tiny kernel. So of consecutive brief calls, each run after a plan's
// first one reads the clock around only a few, each run around other ones; timeline.py estimates the times of the rest.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "counters.h"
#include "words.h"

namespace pellucid {

// The clock of Python's time.perf_counter_ns.
inline int64_t nanoseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Whether the time stamp counter runs at a constant rate in all power states, equal on all cores.
inline bool has_invariant_tsc() {
  unsigned a, b, c, d;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d >> 8 & 1);
}

inline const bool kInvariantTsc = has_invariant_tsc();

// The time stamp counter, read in a third of the time of the system's clock; nanoseconds if it is not invariant.
inline int64_t ticks() {
  return kInvariantTsc ? static_cast<int64_t>(__rdtsc()) : nanoseconds();
}

// One time in nanoseconds and in ticks: of five pairs of readings the closest one.
struct Moment {
  int64_t ns, tick;
};

inline Moment now() {
  Moment best{0, 0};
  int64_t min = INT64_MAX;
  for (int i = 0; i < 5; i++) {
    int64_t before = nanoseconds(), middle = ticks(), after = nanoseconds();
    if (after - before >= min) continue;
    min = after - before;
    best = {before + (after - before) / 2, middle};
  }
  return best;
}

// The operating system's number of the calling thread.
inline int64_t thread_number() {
  thread_local int64_t number = syscall(SYS_gettid);
  return number;
}

// A thread's share of a kernel; `begin` is 0 if it had none.
struct ShareTime {
  int64_t thread = 0, begin = 0, end = 0;
};

// Ticks of each call of strips in one part, and the thread that ran it.
struct PartTimes {
  std::vector<int64_t> calls;
  int64_t thread = 0;
};

// After which calls the runs of a plan read the clock: of eight consecutive brief calls one is timed alone, the others
// together.
class Reading {
 public:
  // ends: of the calls of the plan's first run. first: begin of the first call.
  Reading(int64_t first, const int64_t* ends, size_t calls) {
    for (size_t phase = 0; phase < kPhases; phase++) {
      read_[phase].assign(calls, true);
      for (size_t i = 0; i + 1 < calls; i++) {
        bool brief = ends[i] - (i ? ends[i - 1] : first) < kBrief && ends[i + 1] - ends[i] < kBrief;
        if (brief && (i + phase) % kPhases >= 2) read_[phase][i] = false;
      }
    }
  }

  const char* of_next_run() { return read_[next_++ % kPhases].data(); }

 private:
  static constexpr size_t kPhases = 8;
  static constexpr int64_t kBrief = 1000;  // ticks: a third or half of a microsecond
  std::array<std::vector<char>, kPhases> read_;
  std::atomic<size_t> next_ = 0;
};

// The times of one run. A call begins when the previous one ends.
class RunTimes {
 public:
  // reading: of the plan; null for its first run, which times each call. counters: of this thread, or null.
  RunTimes(int64_t plan, size_t calls, std::shared_ptr<Reading> reading, const CounterGroup* counters)
      : words_(kRunHead + calls), reading_(std::move(reading)), counters_(counters) {
    if (reading_ && !counters_) read_ = reading_->of_next_run();
    words_[0] = plan;
    words_[1] = thread_number();
    words_[2] = ticks();
  }

  void begin_calls() {
    if (counters_) counters_->read(counted_);
    words_[3] = ticks();
  }

  void end_call() {
    if (!read_ || read_[calls_]) words_[kRunHead + calls_] = ticks();
    calls_++;
    if (counters_) counters_->read(counted_);
  }

  // Memory for the shares of `threads` threads in the current call; each fills in its own.
  ShareTime* shares(int64_t threads) {
    shares_.assign(threads, {});
    return shares_.data();
  }

  // Adds the shares, after the threads have filled them in.
  void save_shares() {
    for (const ShareTime& share : shares_)
      if (share.begin) saved_.insert(saved_.end(), {calls_, share.thread, share.begin, share.end});
  }

  // Memory for the times of strips, by part and call.
  PartTimes* parts(int64_t parts, int64_t calls) {
    parts_.assign(parts, {std::vector<int64_t>(calls)});
    return parts_.data();
  }

  // Adds the times of strips, as if their calls had run in sequence, each for its share of the time since `begin`.
  void end_parts(int64_t begin) {
    const int64_t elapsed = ticks() - begin, calls = static_cast<int64_t>(parts_[0].calls.size());
    std::vector<int64_t> taken(calls);
    int64_t all = 0, before = 0;
    for (int64_t call = 0; call < calls; call++)
      for (const PartTimes& part : parts_) taken[call] += part.calls[call];
    for (int64_t each : taken) all += each;
    for (int64_t call = 0; call < calls; call++) {
      const double from = share(before, all), to = share(before += taken[call], all);
      save_parts(call, begin + int64_t(elapsed * from), int64_t(elapsed * (to - from)));
      words_[kRunHead + calls_++] = begin + int64_t(elapsed * to);
    }
    if (counters_) count_parts(taken, all);
  }

  int64_t plan() const { return words_[0]; }

  // The `Reading` for later runs of the plan; null if this run was not completed.
  std::shared_ptr<Reading> reading() const {
    size_t calls = words_.size() - kRunHead;
    if (static_cast<size_t>(calls_) < calls) return nullptr;
    return reading_ ? reading_ : std::make_shared<Reading>(words_[3], &words_[kRunHead], calls);
  }

  // The words that timeline.py reads: plan, thread, begin, begin of the first call, end, number of calls, of shares and
  // of counts; the end of each call, or 0; the call, thread, begin and end of each share; and the value of each counter
  // at the begin of the first call and at the end of each. Times are ticks.
  const std::vector<int64_t>& finished() {
    words_[4] = ticks();
    words_[5] = calls_;
    words_[6] = static_cast<int64_t>(saved_.size()) / 4;
    words_[7] = static_cast<int64_t>(counted_.size());
    words_.resize(kRunHead + calls_);
    words_.insert(words_.end(), saved_.begin(), saved_.end());
    words_.insert(words_.end(), counted_.begin(), counted_.end());
    return words_;
  }

 private:
  static double share(int64_t part, int64_t all) { return all ? double(part) / double(all) : 1.0; }

  // Adds the shares of threads in a call of strips, scaled such that the longest one takes all of its time.
  void save_parts(int64_t call, int64_t begin, int64_t elapsed) {
    int64_t longest = 0;
    for (const PartTimes& part : parts_) longest = std::max(longest, part.calls[call]);
    if (parts_.size() < 2) return;
    for (const PartTimes& part : parts_)
      saved_.insert(saved_.end(),
                    {calls_, part.thread, begin, begin + int64_t(elapsed * share(part.calls[call], longest))});
  }

  // Divides the counts among the calls of strips, in proportion to their times.
  void count_parts(const std::vector<int64_t>& taken, int64_t all) {
    std::vector<int64_t> now;
    counters_->read(now);
    const std::vector<int64_t> start(counted_.end() - static_cast<int64_t>(now.size()), counted_.end());
    int64_t before = 0;
    for (int64_t each : taken) {
      before += each;
      for (size_t i = 0; i < now.size(); i++)
        counted_.push_back(start[i] + int64_t(double(now[i] - start[i]) * share(before, all)));
    }
  }

  std::vector<int64_t> words_, saved_, counted_;
  std::vector<PartTimes> parts_;
  std::vector<ShareTime> shares_;
  std::shared_ptr<Reading> reading_;
  const CounterGroup* counters_;
  const char* read_ = nullptr;  // by call; null: all
  int64_t calls_ = 0;
};

// Collects the times of all runs of the process while it is on.
class Timeline {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // events: hardware events to count too, in each thread that runs graphs.
  void start(std::vector<CounterEvent> events) {
    std::lock_guard<std::mutex> lock(mutex);
    events_ = std::move(events);
    starts_++;
    Moment began = now();
    words_ = {began.ns, began.tick, 0, 0, 0};
    readings_.clear();
    on_ = true;
  }

  // Ends the collection and returns it: nanoseconds and ticks at the start and at the end, the number of runs that did
  // not fit, then the runs. Valid until the next start.
  const std::vector<int64_t>& stop() {
    std::lock_guard<std::mutex> lock(mutex);
    on_ = false;
    words_.resize(std::max(words_.size(), size_t{5}));
    Moment ended = now();
    words_[2] = ended.ns;
    words_[3] = ended.tick;
    return words_;
  }

  // The `Reading` for the next run of a plan; null before the first one has ended.
  std::shared_ptr<Reading> reading(int64_t plan) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = readings_.find(plan);
    return found == readings_.end() ? nullptr : found->second;
  }

  // The counters of the calling thread; null if none are requested, or none are available.
  const CounterGroup* counters() {
    thread_local std::unique_ptr<CounterGroup> group;
    thread_local int64_t start = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (start != starts_) {
      group = events_.empty() ? nullptr : std::make_unique<CounterGroup>(events_);
      start = starts_;
    }
    return group && !group->error() ? group.get() : nullptr;
  }

  void add(RunTimes& times) {
    std::shared_ptr<Reading> reading = times.reading();
    const std::vector<int64_t>& run = times.finished();
    std::lock_guard<std::mutex> lock(mutex);
    if (!on()) return;  // collection stopped during the run
    if (reading) readings_[times.plan()] = std::move(reading);
    if (words_.size() + run.size() > kMaxWords) words_[4]++;
    else words_.insert(words_.end(), run.begin(), run.end());
  }

  std::mutex mutex;

 private:
  static constexpr size_t kMaxWords = 16 << 20;  // 128 MB
  std::atomic<bool> on_ = false;
  std::vector<int64_t> words_;
  std::unordered_map<int64_t, std::shared_ptr<Reading>> readings_;  // by plan
  std::vector<CounterEvent> events_;
  int64_t starts_ = 0;
};

}  // namespace pellucid
