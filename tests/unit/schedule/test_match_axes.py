from __future__ import annotations

from pellucid.ir.parser import parse_kernel
from pellucid.schedule.match_axes import Match, Mismatch, match_axes

FINE = parse_kernel(
    """kernel fine(A: f32[24], B: f32[24]) {
      axes h: 4, r: 6
      v: f32 = load A[6*h + r]
      st: f32 = store B[h + 4*r], v
    }"""
)
FLAT = parse_kernel(
    """kernel flat(B: f32[24], C: f32[24]) {
      axes n: 24
      v: f32 = load B[n]
      st: f32 = store C[n], v
    }"""
)
COLUMN_MAX = parse_kernel(
    """kernel column_max(B: f32[24], C: f32[4]) {
      axes r: 6, h: 4
      v: f32 = load B[4*r + h]
      m: f32 = max v over r
      st: f32 = store C[h], m
    }"""
)
ROW_ARGMAX = parse_kernel(
    """kernel row_argmax(B: f32[24], C: i64[1]) {
      axes h: 4, r: 6
      v: f32 = load B[h + 4*r]
      m: i64 = argmax v over h, r
      st: i64 = store C[0], m
    }"""
)


def index(kernel, buffer):
    return next(line.rhs.index for line in kernel.body if getattr(line.rhs, "buffer", "") == buffer)


def anchor(first, second):
    return index(first, "B"), index(second, "B")


def test_an_axis_is_split():
    match = match_axes(FINE, FLAT, [anchor(FINE, FLAT)])
    assert isinstance(match, Match)
    assert [(axis.name, axis.extent.value) for axis in match.space] == [("h", 4), ("r", 6)]
    assert match.first.index(index(FINE, "B")) == match.second.index(index(FLAT, "B"))


def test_unequal_names_and_orders():
    match = match_axes(FLAT, COLUMN_MAX, [anchor(FLAT, COLUMN_MAX)])
    assert isinstance(match, Match)
    assert match.second.pieces["r"] == ("n.1",)
    assert match.first.index(index(FLAT, "B")) == match.second.index(index(COLUMN_MAX, "B"))


def test_other_reductions():
    match = match_axes(COLUMN_MAX, ROW_ARGMAX, [anchor(COLUMN_MAX, ROW_ARGMAX)])
    assert isinstance(match, Mismatch)
    assert match.category == "reduction-axes"


def test_index_reductions_keep_the_order_of_their_axes():
    match = match_axes(FLAT, ROW_ARGMAX, [anchor(FLAT, ROW_ARGMAX)])
    assert isinstance(match, Mismatch)
    assert match.category == "different-loop-orders"


def test_offsets():
    match = match_axes(FLAT, FLAT, [(index(FLAT, "B"), index(FLAT, "B") + 1)])
    assert isinstance(match, Mismatch)
    assert match.category == "different-offset"
