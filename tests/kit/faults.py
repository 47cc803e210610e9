"""Every planted fault, by name: in small programs, before the graphs of models, inside fused kernels of models."""

from __future__ import annotations

from tests.kit import inside, planted, planted_models

assert planted_models.FAULTS is planted.FAULTS and inside.FAULTS  # each file enters its own

FAULTS = {**planted.FAULTS, **inside.FAULTS}

# Found in seconds: for the part of the score that CI computes. Inductor compiles for longer.
_SLOW = ("hangs", "eats_memory", "race", "layout", "running_statistics")
QUICK = (
    *("inductor_capture", "inductor_neg_does_not_compile", "inductor_rule_fails"),
    *(
        name
        for name in planted.FAULTS
        if name.startswith("pellucid_") and not name.endswith(_SLOW) and "_in_" not in name
    ),
)
