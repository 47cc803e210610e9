"""Which variant a trial takes for each call, and when it has seen enough. Times are made up."""

from __future__ import annotations

import subprocess

import pytest

from pellucid.native.build import default_toolchain
from pellucid.native.sources import SOURCES

HEAD = """
#include "trial.h"
#include <cstdio>
#include <vector>

struct PyObject { std::vector<long long> items; long long value = 0; };
static PyObject callback, last;
static int told = 0;
extern "C" {
void Py_IncRef(PyObject*) {}
void Py_DecRef(PyObject*) {}
PyObject* PyList_New(ptrdiff_t n) { auto* list = new PyObject; list->items.resize(n); return list; }
int PyList_SetItem(PyObject* list, ptrdiff_t i, PyObject* item) { list->items[i] = item->value; return 0; }
PyObject* PyLong_FromLongLong(long long value) { auto* item = new PyObject; item->value = value; return item; }
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...) { told++; return &last; }
void PyErr_WriteUnraisable(PyObject*) {}
}

using pellucid::Trial;
using pellucid::Variant;

struct Made {
  Trial trial;
  std::vector<double> costs;  // of each variant, in nanoseconds
  int calls = 0;

  Made(std::vector<double> given, int64_t sites = 1, size_t number = 0)
      : trial(variants(given.size()), 1, sites, &callback, number), costs(given) {}

  static std::vector<Variant> variants(size_t n) {
    std::vector<Variant> made;
    for (size_t i = 0; i < n; i++) made.push_back({nullptr, static_cast<int64_t>(i), 1});
    return made;
  }

  // Makes a call at a site, which takes `more` than it should; says which variant it took.
  int64_t call(int64_t site = 0, double more = 0) {
    const Variant& variant = trial.next(site);
    calls++;
    trial.record(site, static_cast<int64_t>(costs[variant.extent] + more));
    return variant.extent;
  }

  void finish(int most = 1000) {
    while (trial.open() && calls < most) call();
  }
};
"""


@pytest.fixture
def said(tmp_path):
    """What the body of a `main` prints."""

    def run(body: str) -> str:
        source, program = tmp_path / "trial.cpp", tmp_path / "trial"
        source.write_text(f"{HEAD}\nint main() {{\n{body}\n}}\n")
        compiler = (*default_toolchain().compiler, "-std=c++20", "-I", SOURCES)
        subprocess.run([*compiler, source, "-o", program, "-pthread"], check=True)
        return subprocess.check_output([program], text=True)

    return run


def test_calls_at_a_site_go_a_b_b_a(said):
    body = """
      Made made({1000, 1001});
      for (int i = 0; i < 8; i++) std::printf("%d", (int)made.call());
      Made sites({1000, 1001}, 2);
      std::printf(" ");
      for (int i = 0; i < 8; i++) std::printf("%d", (int)sites.call(i % 2));
      Made second({1000, 1001}, 1, 1);
      std::printf(" ");
      for (int i = 0; i < 8; i++) std::printf("%d", (int)second.call());
    """
    assert said(body) == "01100110 01101001 11001100"


def test_a_run_that_is_slow_as_a_whole_speaks_for_no_way(said):
    body = """
      Made made({1000, 1000}, 24);
      for (int run = 0; made.trial.open(); run++)
        for (int site = 0; site < 24; site++) made.call(site, run % 4 == 1 ? 300 : 0);
      std::printf("%d", (int)made.trial.best().extent);
    """
    assert said(body) == "0"


def test_few_pairs_are_enough_where_they_agree_clearly(said):
    body = """
      Made faster({1000, 800}), slower({1000, 1200});
      faster.finish(), slower.finish();
      std::printf("%d %d %d %d", (int)faster.trial.best().extent, faster.calls, (int)slower.trial.best().extent,
                  slower.calls);
    """
    assert said(body) == "1 8 0 8", "three pairs after the one that is dropped"


def test_the_median_of_many_decides_where_they_do_not(said):
    body = """
      Made made({1000, 980});
      for (int i = 0; made.trial.open(); i++) made.call(0, i % 7 == 3 ? 5000 : 0);
      std::printf("%d %d", (int)made.trial.best().extent, made.calls);
    """
    assert said(body) == "1 44"


def test_a_tie_is_won_by_the_cheaper_price(said):
    body = """
      Made made({1000, 998});
      made.finish();
      std::printf("%d %d", (int)made.trial.best().extent, made.calls);
    """
    assert said(body) == "0 44"


def test_the_first_pair_of_a_site_does_not_count(said):
    body = """
      Made made({1000, 800});
      made.call(0), made.call(0, 90000);
      made.finish();
      std::printf("%d %d", (int)made.trial.best().extent, made.calls);
    """
    assert said(body) == "1 8"


def test_the_best_so_far_meets_each_of_the_others(said):
    body = """
      Made made({1000, 800, 900, 600});
      made.finish();
      std::printf("%d %d;", (int)made.trial.best().extent, made.calls);
      made.trial.report(), made.trial.report();
      std::printf("%d", told);
    """
    assert said(body) == "3 24;1"


def test_nobody_is_told_before_the_end(said):
    body = """
      Made made({1000, 800});
      made.call(), made.call();
      made.trial.report();
      std::printf("%d", told);
    """
    assert said(body) == "0"
