"""Statistics of measurements: medians, their spread and uncertainty, and timing without garbage collection."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """The quartiles of a sample: on a shared machine, means and standard deviations follow the worst outlier."""

    median: float
    q1: float
    q3: float
    count: int

    @property
    def spread(self) -> float:
        """Half the interquartile range, relative to the median (0.02 reads as ±2%)."""
        return (self.q3 - self.q1) / 2 / abs(self.median) if self.median else 0.0

    @property
    def uncertainty(self) -> float:
        """Relative half-width of the median's 95% interval: 1.57 IQR / sqrt(n), as in a notched box plot."""
        return 1.57 * 2 * self.spread / math.sqrt(self.count)


def summarise(samples: Sequence[float]) -> Summary:
    """The quartiles of `samples`, linearly interpolated.

    >>> summarise([4.0, 1.0, 3.0, 2.0, 5.0])
    Summary(median=3.0, q1=2.0, q3=4.0, count=5)

    Raises `ValueError` on an empty sample.
    """
    if not samples:
        raise ValueError("no samples to summarise")
    if len(samples) == 1:
        return Summary(samples[0], samples[0], samples[0], 1)
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(median, q1, q3, len(samples))


def midmean(samples: Sequence[float]) -> float:
    """The mean of the middle half, or of all if there are few.

    >>> midmean([1.0, 2.0, 4.0, 100.0])
    3.0

    Raises `ValueError` on an empty sample.
    """
    quarter = len(samples) // 4
    return statistics.fmean(sorted(samples)[quarter : len(samples) - quarter])


def pairwise_ratio(baseline: Sequence[float], subject: Sequence[float]) -> Summary:
    """How many times faster `subject` is, round by round: a slow phase of the machine affects both equally.

    >>> pairwise_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]).median
    2.0
    """
    return summarise([b / s for b, s in zip(baseline, subject, strict=True)])


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios: that of 2x and 0.5x is 1x. Raises `ValueError` on an empty sequence."""
    return statistics.geometric_mean(values)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector, which would delay some calls and not others."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
