"""Sizes that are shared by C++ kernels, plans and cost estimates.

They are defined only here: `pytest tests/golden --bless` generates the header `native/sizes.h` from them.
"""

from __future__ import annotations

DEPTH = 192
"""Units that are packed at a time; all taps of a channel must be among them."""
FEW_ROWS = 8
"""Up to this number of rows of the left operand, packing the right one does not pay: it is read in place."""
FEW_COLUMNS = 4
"""Up to this number of columns of the right operand, panels would be mostly empty."""
SAME_SET = 4096
"""Rows with a stride of this many bytes map to one set of the L1 cache, which cannot hold `ROWS` of them: copy them."""
AMX_TILE = 16
"""Rows of a tile (AMX), units of a row, and columns."""
AMX_ROWS = 2 * AMX_TILE
"""Rows of sums that products by AMX tiles compute at a time."""
PLACES = 16
"""Elements of a transformed tile in Winograd's method, 4 x 4."""
TAPS = 9
"""Taps of a weight in Winograd's method, 3 x 3."""
TRANSFORMED = 128
"""Channels whose weights are transformed at a time in Winograd's method."""
QUERIES = 24
"""Rows of attention whose scores are computed at once, except by AMX tiles."""
ROWS_IN_PLACE = 3
"""Up to this number of rows, attention reads keys and values in place, without packing."""


def sizes_text() -> str:
    """All of them as C++."""
    sizes = {name: value for name, value in globals().items() if name.isupper()}
    lines = "".join(f"constexpr int {name} = {value};\n" for name, value in sizes.items())
    return f"namespace pv {{\n{lines}}}  // namespace pv\n"
