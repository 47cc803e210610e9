// What the processor counts while the calling thread runs: cycles, instructions, misses of the cache, through Linux perf.
#pragma once

#include <linux/perf_event.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <vector>

namespace pellucid {

// By type and config of perf_event_open(2).
struct CounterEvent {
  int64_t type, config;
};

// The counters of one thread, one group: they all count, or none does.
class CounterGroup {
 public:
  explicit CounterGroup(const std::vector<CounterEvent>& events) {
    for (const CounterEvent& event : events) {
      perf_event_attr about{};
      about.size = sizeof about;
      about.type = static_cast<uint32_t>(event.type);
      about.config = static_cast<uint64_t>(event.config);
      about.read_format = PERF_FORMAT_GROUP;
      about.exclude_kernel = about.exclude_hv = 1;  // which perf_event_paranoid 2 allows to everybody
      int leader = files_.empty() ? -1 : files_.front();
      int file = static_cast<int>(syscall(SYS_perf_event_open, &about, 0, -1, leader, PERF_FLAG_FD_CLOEXEC));
      if (file < 0) {
        error_ = errno;
        close_all();
        return;
      }
      files_.push_back(file);
    }
  }
  CounterGroup(const CounterGroup&) = delete;
  CounterGroup& operator=(const CounterGroup&) = delete;
  ~CounterGroup() { close_all(); }

  // 0, or why the system gives none, as errno.
  int error() const { return error_; }

  // Appends what each has counted since the group was made; zeros where that cannot be read.
  void read(std::vector<int64_t>& into) const {
    size_t count = files_.size();
    int64_t values[1 + kMost] = {};
    if (::read(files_.front(), values, (1 + count) * sizeof(int64_t)) < 0) values[1] = 0;
    into.insert(into.end(), values + 1, values + 1 + count);
  }

  static constexpr size_t kMost = 8;

 private:
  void close_all() {
    for (int file : files_) close(file);
    files_.clear();
  }

  std::vector<int> files_;  // the first one leads
  int error_ = 0;
};

}  // namespace pellucid
