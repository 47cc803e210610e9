"""What of the tests that take long runs at each commit."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32


def third_of_commit() -> int:
    """0, 1 or 2: the commit decides, so that a failure repeats itself and the next commits run the other thirds."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return int(head.stdout[:8] or "0", 16) % 3


def other_thirds(cases: Iterable[str], third: int) -> set[str]:
    """Of these node ids those that are in another third.

    Neighbours among the cases of a test are in different ones, and so are tests: their names decide where each begins.
    """
    tests = defaultdict[str, list[str]](list)
    for case in cases:
        tests[case.partition("[")[0]].append(case)
    return {
        case
        for test, of_test in tests.items()
        for at, case in enumerate(of_test, crc32(test.encode()))
        if at % 3 != third
    }
