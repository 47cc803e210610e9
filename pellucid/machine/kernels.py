"""Sizes that are written into kernels and that plans and prices count with.

They stand here alone: the header `native/sizes.h` is made of them, by `pytest tests/golden --bless`.
"""

from __future__ import annotations

DEPTH = 192
"""Units that are packed at a time; all taps of a channel must be among them."""
FEW_ROWS = 8
"""Rows of a left operand up to which packing the right one costs more than it saves: they read it where it lies."""
FEW_COLUMNS = 4
"""Columns of a right operand that would leave panels mostly empty."""
SAME_SET = 4096
"""Rows so many bytes apart lie in one set of the first cache, which cannot hold `ROWS` of them: they are copied."""
AMX_TILE = 16
"""Rows of a tile (AMX), units of a row, and columns."""
AMX_ROWS = 2 * AMX_TILE
"""Rows of sums that products by tiles compute at a time."""
PLACES = 16
"""Places of a tile for Winograd's method."""
TAPS = 9
"""Taps of a weight for it."""
TRANSFORMED = 128
"""Channels whose weights are transformed at a time for it."""
QUERIES = 24
"""Rows of attention whose scores are in work at once, where they are not computed by tiles."""
ROWS_IN_PLACE = 3
"""Rows of attention that read keys and values where they lie."""


def sizes_text() -> str:
    """All of them as C++."""
    sizes = {name: value for name, value in globals().items() if name.isupper()}
    lines = "".join(f"constexpr int {name} = {value};\n" for name, value in sizes.items())
    return f"namespace pv {{\n{lines}}}  // namespace pv\n"
