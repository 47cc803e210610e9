// Several variants of a kernel, of which the fastest is found while the program runs. Each call runs one of them, so
// nothing is computed twice, and kernels that work in place need no copies.
//
// The best variant so far, initially the first, is compared with each of the others in turn, and replaced by one that
// is faster. The calls of one site run variants in the order A B B A, and the two calls of a pair are compared: they
// have the same data, and a disturbance that lasts longer than a call affects both. Sites, and trials of one program,
// begin at different positions of A B B A, so that a run that is slow as a whole, or has other trials, favours neither.
// The first pair of a site has cold caches and is dropped; the median of the others decides, or a few clear ones.
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
  // variants: the cheapest by estimated cost first. threads: of a measured call. sites: how many calls of a plan
  // share the trial. settled: called once with a list, see `Trial` in instance.py. number: of the trial in its plan.
  Trial(std::vector<Variant> variants, int64_t threads, int64_t sites, PyObject* settled, size_t number = 0)
      : variants(std::move(variants)), threads(threads), settled_(settled), number_(number), sites_(sites),
        times_(this->variants.size()) {
    Py_IncRef(settled_);
  }
  ~Trial() { Py_DecRef(settled_); }
  Trial(const Trial&) = delete;

  const std::vector<Variant> variants;
  const int64_t threads;
  std::mutex mutex;  // held while a measured call runs; other calls don't wait for it

  bool open() const { return open_.load(std::memory_order_relaxed); }

  // The variant for a call that is not measured.
  const Variant& best() const { return variants[best_.load(std::memory_order_relaxed)]; }

  // The variant for a call that is measured. The mutex is held from here to `record`.
  const Variant& next(int64_t number) {
    Site& site = sites_[number];
    if (site.rival != rival_) site = new_site(number);
    return variants[site.turn == 1 || site.turn == 2 ? rival_ : best_.load(std::memory_order_relaxed)];
  }

  // Records the time of a measured call; returns whether it ended the trial.
  bool record(int64_t number, int64_t nanoseconds) {
    Site& site = sites_[number];
    int turn = site.turn;
    site.turn = (turn + 1) % 4;
    if (turn % 2 == 0) {
      site.first = nanoseconds;
      return false;
    }
    if (++site.pairs <= 0) return false;
    int64_t rival = turn == 1 ? nanoseconds : site.first, best = turn == 1 ? site.first : nanoseconds;
    times_[rival_].push_back(static_cast<double>(rival));
    times_[best_].push_back(static_cast<double>(best));
    ratios_.push_back(static_cast<double>(rival) / static_cast<double>(std::max<int64_t>(best, 1)));
    return site.pairs >= kBothOrders && enough() && next_rival();
  }

  // Reports the outcome to Python, once the trial has ended. The GIL is held, and no exception is set.
  void report() {
    if (open() || reported_) return;
    reported_ = true;
    PyObject* list = PyList_New(static_cast<ptrdiff_t>(2 + variants.size()));
    PyList_SetItem(list, 0, PyLong_FromLongLong(static_cast<int64_t>(best_)));
    PyList_SetItem(list, 1, PyLong_FromLongLong(pairs_));
    for (size_t i = 0; i < variants.size(); i++)
      PyList_SetItem(list, static_cast<ptrdiff_t>(2 + i), PyLong_FromLongLong(static_cast<int64_t>(median(times_[i]))));
    PyObject* done = PyObject_CallFunctionObjArgs(settled_, list, nullptr);
    Py_DecRef(list);
    if (done) Py_DecRef(done);
    else PyErr_WriteUnraisable(settled_);  // no result depends on it
  }

 private:
  static constexpr size_t kMinPairs = 3, kMaxPairs = 21;
  static constexpr int kBothOrders = 2;                   // pairs of a site: A B and B A
  static constexpr double kClear = 0.05, kTie = 0.005;    // in a tie the variant of lower estimated cost wins

  struct Site {
    size_t rival = 0;   // that the other members are about; 0 before the first call
    int turn = 0;       // position in A B B A
    int pairs = 0;      // that were measured; negative while pairs are still dropped
    int64_t first = 0;  // nanoseconds of the pair's first call
  };

  // A site that begins with the second call of a pair drops that incomplete pair too.
  Site new_site(int64_t site) const {
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
    if (ratios_.size() < kMinPairs) return false;
    auto [min, max] = std::minmax_element(ratios_.begin(), ratios_.end());
    return ratios_.size() >= kMaxPairs || *max < 1 - kClear || *min > 1 + kClear;
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
  std::vector<double> ratios_;              // the rival's time / the best one's time, by pair
  size_t rival_ = 1;
  int64_t pairs_ = 0;
  std::atomic<size_t> best_{0};
  std::atomic<bool> open_{true};
  bool reported_ = false;
};

}  // namespace pellucid
