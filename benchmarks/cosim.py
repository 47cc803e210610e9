"""What cosimulation costs: its time beside one eager and one compiled run of the same graphs, compilation apart.

    python benchmarks/cosim.py [--backend inductor] [TARGET ...]

Targets default to whole MobileBERT in inference and a training step of GPT-2 (`tests/kit/suite.py`). Each round times an
eager run, a compiled run and a cosimulation, one after the other; the ratio is that of each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import click
import torch

from pellucid.debug.case import copied
from pellucid.debug.check import Request, captured
from pellucid.debug.cosim import COMPLETE, LIVE, simulate
from pellucid.debug.graphs import interpret

DEFAULT = (("tests/kit/suite.py:mobilebert", False), ("tests/kit/suite.py:gpt2_training", True))


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@click.command()
@click.argument("targets", nargs=-1)
@click.option("--backend", default="pellucid")
@click.option("--rounds", default=7)
def main(targets: tuple[str, ...], backend: str, rounds: int) -> None:
    """Print the ratio for each target; those named `*_training` are differentiated."""
    for target, backward in [(each, each.endswith("_training")) for each in targets] or DEFAULT:
        graphs, subject = captured(Request(target, backend, backward=backward))
        compiled = [subject.compile(graph) for graph in graphs]
        for mode in (COMPLETE, LIVE):
            ratios: list[float] = []
            results = 0
            for _ in range(rounds):
                eager = seconds(lambda: [interpret(graph.module, copied(graph.inputs)) for graph in graphs])
                fast = seconds(
                    lambda: [each.run(copied(graph.inputs)) for graph, each in zip(graphs, compiled, strict=True)]
                )
                start = time.perf_counter()
                found = [simulate(graph, each, mode) for graph, each in zip(graphs, compiled, strict=True)]
                ratios.append((time.perf_counter() - start) / (eager + fast))
                results = sum(map(len, found))
            q1, _, q3 = quantiles(ratios, n=4)
            print(
                f"{target} {backend} {mode}: {results} results, {median(ratios):.2f} [{q1:.2f}, {q3:.2f}] times one "
                f"eager ({eager * 1e3:.0f} ms) and one compiled run ({fast * 1e3:.0f} ms)"
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
