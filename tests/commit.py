"""What of a long list of cases runs at each commit."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def third_of_commit() -> int:
    """0, 1 or 2: the commit decides, so that a failure repeats itself and the next commits run the other thirds."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return int(head.stdout[:8] or "0", 16) % 3


def other_thirds(cases: Iterable[str], third: int) -> set[str]:
    """Of these node ids those that are in another third: neighbours among the cases of a test are in different ones."""
    tests = defaultdict[str, list[str]](list)
    for case in cases:
        tests[case.partition("[")[0]].append(case)
    return {case for of_test in tests.values() for at, case in enumerate(of_test) if at % 3 != third}
