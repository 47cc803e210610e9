// Hardware counters of the calling thread: cycles, instructions, cache misses, through Linux perf.
#pragma once

#include <linux/perf_event.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <vector>

namespace pellucid {

// type, config: as in perf_event_open(2).
struct CounterEvent {
  int64_t type, config;
};

// The counters of one thread, as one group: either all count, or none.
class CounterGroup {
 public:
  explicit CounterGroup(const std::vector<CounterEvent>& events) {
    for (const CounterEvent& event : events) {
      perf_event_attr attributes{};
      attributes.size = sizeof attributes;
      attributes.type = static_cast<uint32_t>(event.type);
      attributes.config = static_cast<uint64_t>(event.config);
      attributes.read_format = PERF_FORMAT_GROUP;
      attributes.exclude_kernel = attributes.exclude_hv = 1;  // needs no privileges if perf_event_paranoid is 2
      int leader = files_.empty() ? -1 : files_.front();
      int file = static_cast<int>(syscall(SYS_perf_event_open, &attributes, 0, -1, leader, PERF_FLAG_FD_CLOEXEC));
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

  // 0, or the errno of a failed perf_event_open.
  int error() const { return error_; }

  // Appends each counter's value since the group was created; zeros if they cannot be read.
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

  std::vector<int> files_;  // file descriptors; the first one is the group leader
  int error_ = 0;
};

}  // namespace pellucid
