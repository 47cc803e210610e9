"""No "no" without a reason: what was not fused and not vectorised in the models of the suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pellucid import pipeline
from pellucid.ir.analysis import reads, writes
from pellucid.ir.nodes import Kernel
from pellucid.kit.subjects.base import loss_of
from pellucid.trace.record import GraphRecord
from tests.small_models import build_small

QUICK = ("bert", "convnext", "resnet", "t5")
QUICK_IN_TRAINING = ("bert",)
SLOW = ("mobilebert", "gpt2", "llama", "vit", "mobilenet", "whisper")


# Every model in inference and in training; the expensive ones are marked slow.
CASES = [
    pytest.param(name, train, marks=() if name in quick else pytest.mark.slow)
    for train, quick in ((False, QUICK), (True, QUICK_IN_TRAINING))
    for name in (*QUICK, *SLOW)
]


def neighbours(record: GraphRecord) -> Iterator[tuple[Kernel, Kernel]]:
    """Pairs of kernels of which the second reads what the first wrote."""
    writer: dict[str, Any] = {}
    for node in record.scheduled.nodes:
        for buffer in reads(node) if isinstance(node, Kernel) else ():
            if isinstance(writer.get(buffer), Kernel):
                yield writer[buffer], node
        writer.update(dict.fromkeys(writes(node), node))


def whole(name: str, cut: set[str]) -> str:
    """The kernel of which this one is a phase or computes the rows, for those that were taken apart."""
    stem = name.rpartition("_")[0]
    return whole(stem, cut) if stem in cut else name


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "train"), CASES)
def test_what_was_not_done_has_a_reason(name, train, monkeypatch):
    records: list[GraphRecord] = []
    made = pipeline._record
    monkeypatch.setattr(pipeline, "_record", lambda *args: records.append(made(*args)) or records[-1])
    torch._dynamo.reset()
    module, inputs = build_small(name)
    with torch.set_grad_enabled(train):
        result = torch.compile(module.train(train), backend="pellucid")(**inputs)
        if train:
            loss_of(result).backward()
    assert len(records) == 1 + train
    for record in records:
        refused = [decision for decision in record.decisions if not decision.ok]
        parts = {d.subject[0]: set(d.subject) for d in record.decisions if d.rule == "fuse.kernel" and d.ok}
        unfused = [set(d.subject) for d in refused if d.rule.startswith("fuse")]
        rules = ("schedule.two_phases", "schedule.hoist")
        cut = {d.subject[0] for d in record.decisions if d.rule in rules and d.ok}
        for first, second in neighbours(record):
            one, two = (whole(kernel.name, cut) for kernel in (first, second))
            a, b = (parts.get(name, set()) | {name} for name in (one, two))
            reason = one in cut if one == two else any(about & a and about & b for about in unfused)
            assert reason, (first.name, second.name)
        scalar = {name for name, kernel in record.kernels.items() if kernel.plan.vector is None}
        assert scalar <= {d.subject[0] for d in refused if d.rule == "codegen.vectorize"}
