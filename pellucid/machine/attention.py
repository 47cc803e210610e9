"""Block sizes and instruction counts of the attention kernels `native/kernel/attend.h` and `attend_backward.h`.

Block sizes depend on tensor sizes only, never on the number of threads, so results do not depend on that either.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.ir.types import DType
from pellucid.machine.cost import issuing, time
from pellucid.machine.kernels import QUERIES, ROWS_IN_PLACE
from pellucid.machine.model import Machine
from pellucid.machine.work import Work

MAX_HEAD_SIZE = 256
"""The maximum head size: with a larger one, blocks would not stay in the L2 cache."""

# Maximum number of elements of a block of keys or values, and of the sums of a block of rows; maximum number of keys of
# a block, with which passes over the sums are rare enough.
_KEYS_AND_COLUMNS = 32768
_ROWS_AND_COLUMNS = 65536
_KEYS = 512
_PANEL = 32  # columns of the widest panel
# With this number of blocks no thread waits long for another; blocks of fewer rows would pack too often.
_ENOUGH = 12
_MIN_ROWS = 48

GRADIENT_ROWS = 96
"""Rows of a block of gradients: a multiple of the rows whose scores are computed at once."""

# Maximum number of keys of a block of gradients, and of its elements: the cache holds five such blocks.
_GRADIENT_KEYS = 192
_GRADIENT_KEYS_AND_COLUMNS = 32768

# Instructions per lane: for one term of a product in the micro-kernel, for a sum in addition to its terms, for the
# softmax weight of a score, for packing an element in whole registers, or by itself. Measured on an AMD EPYC (Zen 4)
# with AVX2.
_TERM = 1.15
_SUM = 5.0
_WEIGHT = 36.0
_PACK = 12.0
_PACK_ONE = 64.0
# Instructions per lane with few rows: for a sum of a dot product, and for reading a value, shared by the rows.
_DOT = 64.0
_VALUE = 4.0
# The share of softmax weights in ATen's time at the head size of 64, where its rate is measured; and the minimum number
# of rows with which its products reach that rate.
_LIBRARY_WEIGHTS = 0.25
_LIBRARY_SIZE = 64
_LIBRARY_ROWS = 4
# Instructions of the library's products per element of keys or values in a narrow type, which it packs one by one.
# Measured on an Intel Xeon with AMX.
_LIBRARY_PACK = 4.0


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of an attention: `count` heads of `rows` queries and `keys` keys, each of `size` elements of `dtype`.

    sharing: how many of these heads have the same keys and values.
    share: the fraction of scores that is computed, 1 unless `causal`.
    """

    count: int
    rows: int
    keys: int
    size: int
    causal: bool = False
    dtype: DType = DType.F32
    sharing: int = 1

    @property
    def share(self) -> float:
        if not self.causal:
            return 1.0
        seen = min(self.rows, self.keys)
        return (seen * (seen + 1) / 2 + (self.rows - seen) * self.keys) / max(1, self.rows * self.keys)

    @property
    def _width(self) -> int:
        """Columns, rounded up to whole panels."""
        return -(-self.size // _PANEL) * _PANEL

    @property
    def flops(self) -> int:
        """Floating point operations of both products."""
        return int(4 * self.count * self.rows * self.keys * self.size * self.share)

    @property
    def library_flops(self) -> int:
        """The operations that ATen's kernel would execute in the time of this attention, at its measured rate."""
        rows = max(self.rows, _LIBRARY_ROWS) / max(1, self.rows) * self.share
        size = (1 - _LIBRARY_WEIGHTS) * self.size + _LIBRARY_WEIGHTS * _LIBRARY_SIZE
        return int(4 * self.count * self.rows * self.keys * size * rows)

    @property
    def key_block(self) -> int:
        """Keys of a block."""
        return min(_KEYS, _KEYS_AND_COLUMNS // self._width // _PANEL * _PANEL)

    @property
    def row_block(self) -> int:
        """Rows of a block: as many as fit the cache, fewer if there would be too few blocks for the threads."""
        pieces = -(-self.rows // (_ROWS_AND_COLUMNS // self._width))
        while self.count * pieces < _ENOUGH and self.rows >= 2 * pieces * _MIN_ROWS:
            pieces *= 2
        return max(1, -(-self.rows // (pieces * QUERIES)) * QUERIES if pieces > 1 else self.rows)

    @property
    def gradient_keys(self) -> int:
        """Keys of a block of gradients."""
        return min(_GRADIENT_KEYS, _GRADIENT_KEYS_AND_COLUMNS // self._width // _PANEL * _PANEL)

    def kernel_time(self, machine: Machine) -> float:
        """Nanoseconds of the kernel on one thread."""
        return time(self._work(self.flops, steps=self.steps(machine)), machine).nanoseconds

    def library_time(self, machine: Machine) -> float:
        """Nanoseconds of ATen's fused kernel on one thread."""
        return time(self._work(self.library_flops, kind="attention"), machine).nanoseconds

    def _work(self, flops: int, kind: str = "kernel", steps: float = 0.0) -> Work:
        written = self.rows * self._row_bytes
        read = written + 2 * self.keys * self._row_bytes // self.sharing
        return Work(read, written, read + written, flops, self.dtype, steps, kind)

    def written_out_time(self, machine: Machine) -> float:
        """Nanoseconds on one thread of the unfused attention: two products, and a softmax through memory."""
        scores = self.count * self.rows * self.keys
        held = scores * self.dtype.itemsize
        rows, keys = self.rows * self._row_bytes, self.keys * self._row_bytes
        flops = 2 * scores * self.size
        moved = ((rows + keys, held), (held + keys, rows))
        products = [Work(r, w, r + w, flops, self.dtype, kind="product") for r, w in moved]
        softmax = Work(held, held, 2 * held, scores, steps=scores * _WEIGHT / machine.lanes)
        packed = 2 * self.count * self.keys * self.size * _LIBRARY_PACK if self.dtype is not DType.F32 else 0
        return sum(time(work, machine).nanoseconds for work in (*products, softmax)) + issuing(machine, packed)

    @property
    def _row_bytes(self) -> int:
        """Bytes of one row of all heads."""
        return self.count * self.size * self.dtype.itemsize

    def gradient_steps(self, machine: Machine) -> float:
        """Vector instructions of a call that computes gradients: five products, and the weights recomputed."""
        scores, products = self.count * self.rows * self.keys * self.share, machine.isa.products(self.dtype)
        return scores * (5 * self._width * _TERM / products + 2 * _SUM + _WEIGHT) / machine.lanes

    def steps(self, machine: Machine) -> float:
        """Vector instructions of a call."""
        scores, terms = self.count * self.rows * self.keys * self.share, machine.isa.terms(self.dtype)
        if self.rows <= ROWS_IN_PLACE:
            each = self.size * (2 / terms + _VALUE / self.rows) + _DOT + _WEIGHT
            return scores * each / machine.lanes
        panel = 2 * machine.lanes
        width = -(-self.size // panel) * panel
        each = (self.size + width) * _TERM / machine.isa.products(self.dtype) + _SUM + _WEIGHT
        alone = self.size % machine.lanes + self.size % panel  # of a key and of a value
        packed = (2 * self.size - alone) * _PACK / terms + alone * _PACK_ONE
        blocks = self.count * -(-self.rows // self.row_block)
        return (scores * each + blocks * self.keys * packed) / machine.lanes
