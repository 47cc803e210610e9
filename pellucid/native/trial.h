// Several variants to run a kernel, of which the fastest here is found while the program runs. Each call runs one of them, so
// nothing is computed twice, and kernels that work in place need no copies.
//
// The first variant is held against each of the others in turn, and gives its place to one that is faster. At each site of a
// program calls go A B B A, and the two of a pair are compared: they have the same data, and what slows the machine for
// longer than a call slows both. Sites, and trials of one program, begin at different places of A B B A: a run that is
// slow as a whole, or in which a neighbour is tried too, speaks for neither. The first pair of a site finds caches cold
// and is dropped; the median of the others decides, or a few that agree clearly.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "python_abi.h"

namespace pellucid {

using KernelFunction = int64_t (*)(void* const* p, const int64_t* s, int64_t begin, int64_t end);

struct Variant {
  KernelFunction function;
  int64_t extent, grain;
};

class Trial {
 public:
  // variants: the cheapest by price first. threads: as many as a call must have to count. sites: the calls of a plan that
  // share the trial. settled: called once with a list, see `Trial` in instance.py. number: of the plan's trials.
  Trial(std::vector<Variant> variants, int64_t threads, int64_t sites, PyObject* settled, size_t number = 0)
      : variants(std::move(variants)), threads(threads), settled_(settled), number_(number), sites_(sites),
        times_(this->variants.size()) {
    Py_IncRef(settled_);
  }
  ~Trial() { Py_DecRef(settled_); }
  Trial(const Trial&) = delete;

  const std::vector<Variant> variants;
  const int64_t threads;
  std::mutex mutex;  // of a call that counts, as long as it runs; others don't wait for it

  bool open() const { return open_.load(std::memory_order_relaxed); }

  // What a call runs that does not count.
  const Variant& best() const { return variants[best_.load(std::memory_order_relaxed)]; }

  // What a call runs that counts. The mutex is held, from here to `note`.
  const Variant& next(int64_t number) {
    Site& site = sites_[number];
    if (site.rival != rival_) site = begun(number);
    return variants[site.turn == 1 || site.turn == 2 ? rival_ : best_.load(std::memory_order_relaxed)];
  }

  // True: this was the last call that the trial needed.
  bool note(int64_t number, int64_t nanoseconds) {
    Site& site = sites_[number];
    int turn = site.turn;
    site.turn = (turn + 1) % 4;
    if (turn % 2 == 0) {
      site.before = nanoseconds;
      return false;
    }
    if (++site.pairs <= 0) return false;
    int64_t rival = turn == 1 ? nanoseconds : site.before, best = turn == 1 ? site.before : nanoseconds;
    times_[rival_].push_back(static_cast<double>(rival));
    times_[best_].push_back(static_cast<double>(best));
    ratios_.push_back(static_cast<double>(rival) / static_cast<double>(std::max<int64_t>(best, 1)));
    return site.pairs >= kBothOrders && enough() && next_rival();
  }

  // Say what came out, if all is known and nobody has been told. The GIL is held, and no exception is set.
  void tell() {
    if (open() || told_) return;
    told_ = true;
    PyObject* list = PyList_New(static_cast<ptrdiff_t>(2 + variants.size()));
    PyList_SetItem(list, 0, PyLong_FromLongLong(static_cast<int64_t>(best_)));
    PyList_SetItem(list, 1, PyLong_FromLongLong(pairs_));
    for (size_t i = 0; i < variants.size(); i++)
      PyList_SetItem(list, static_cast<ptrdiff_t>(2 + i), PyLong_FromLongLong(static_cast<int64_t>(median(times_[i]))));
    PyObject* done = PyObject_CallFunctionObjArgs(settled_, list, nullptr);
    Py_DecRef(list);
    if (done) Py_DecRef(done);
    else PyErr_WriteUnraisable(settled_);  // it concerns no result
  }

 private:
  static constexpr size_t kFewest = 3, kMost = 21;        // pairs
  static constexpr int kBothOrders = 2;                   // pairs of a site that go A B and B A
  static constexpr double kClear = 0.05, kTie = 0.005;    // a tie is won by the cheaper price

  struct Site {
    size_t rival = 0;    // for which the rest counts; 0 before the first call
    int turn = 0;        // of A B B A
    int pairs = 0;       // that count; below 0 some must pass before
    int64_t before = 0;  // nanoseconds of the pair's first call
  };

  // One that begins with the second call of a pair lacks the first one of it.
  Site begun(int64_t site) const {
    int turn = static_cast<int>((2 * site + number_) % 4);
    return {rival_, turn, turn % 2 ? -2 : -1, 0};
  }

  static double median(std::vector<double> values) {
    if (values.empty()) return 0;
    auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  bool enough() const {
    if (ratios_.size() < kFewest) return false;
    auto [least, most] = std::minmax_element(ratios_.begin(), ratios_.end());
    return ratios_.size() >= kMost || *most < 1 - kClear || *least > 1 + kClear;
  }

  bool next_rival() {
    pairs_ += static_cast<int64_t>(ratios_.size());
    if (median(ratios_) < 1 - kTie) best_.store(rival_, std::memory_order_relaxed);
    ratios_.clear();
    if (++rival_ < variants.size()) return false;
    open_.store(false, std::memory_order_relaxed);
    return true;
  }

  PyObject* settled_;
  size_t number_;
  std::vector<Site> sites_;
  std::vector<std::vector<double>> times_;  // nanoseconds of each variant
  std::vector<double> ratios_;              // of the rival's time to the best one's
  size_t rival_ = 1;
  int64_t pairs_ = 0;
  std::atomic<size_t> best_{0};
  std::atomic<bool> open_{true};
  bool told_ = false;
};

}  // namespace pellucid
