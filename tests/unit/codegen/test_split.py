"""Blocks of images whose sizes are known at the call alone."""

from __future__ import annotations

import pytest

from pellucid.codegen.block_sizes import split_image, split_lines
from pellucid.ir.index import Expr, sym
from pellucid.ir.interp import size_of

LINES, PIXELS = sym("u0"), sym("u1")
SIZES = [*range(12), 31, 32, 33, 56, 119, 120, 121, 239, 240, 241, 480, 481, 1000]


def sized(size: Expr, lines: int, pixels: int = 1) -> int:
    return size_of(size, {"u0": lines, "u1": pixels})


@pytest.mark.parametrize("share", [1, 2, 3])
@pytest.mark.parametrize(("most", "unit"), [(240, 1), (57, 2), (1, 2)])
def test_pieces_of_images_fit_and_are_even(most: int, unit: int, share: int) -> None:
    sizes = split_image(LINES, PIXELS, most, unit, share)
    assert sizes.pixels is not None
    for lines in SIZES:
        for pixels in SIZES:
            down, along = sized(sizes.lines, lines, pixels), sized(sizes.pixels, lines, pixels)
            assert down >= unit and along >= unit and down % unit == along % unit == 0
            assert (down // unit) * (along // unit) <= most
            in_units = -(-pixels // unit)
            pieces = -(-in_units // most)
            assert along // unit == max(1, -(-in_units // max(1, pieces)))


@pytest.mark.parametrize("share", [1, 2, 3])
def test_pieces_of_lines_come_in_shares(share: int) -> None:
    size = split_lines(LINES, 8, share)
    for lines in SIZES:
        piece = sized(size, lines)
        assert 1 <= piece <= 8
        if lines % share == 0 and lines // share in (1, 2, 4, 8, 16):
            assert -(-lines // piece) % share == 0


@pytest.mark.parametrize("share", [1, 2, 3])
@pytest.mark.parametrize(("most", "step"), [(480, 2), (240, 16), (256, 16), (16, 16)])
def test_pieces_of_rows_are_multiples_of_a_step(most: int, step: int, share: int) -> None:
    size = split_lines(LINES, most, share, step)
    for rows in SIZES:
        piece = sized(size, rows)
        assert step <= piece <= most and piece % step == 0
        pieces, fewest = -(-rows // piece), -(-rows // most)
        assert pieces <= -(-fewest // share) * share, "no more pieces than shares ask for"
        if rows >= share * share * step and fewest <= share:
            assert pieces == share


def test_sizes_that_are_at_least_one_need_no_care_for_zero() -> None:
    """Sums of divisions stand in the loop of every kernel, where people read them."""
    assert str(split_lines(sym("s0"), 480, 1)) == "((s0 - 1) // ((s0 + 479) // 480)) + 1"
