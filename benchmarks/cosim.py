"""What cosimulation costs: its time beside one eager and one compiled run of the same graphs, compilation apart.

    python benchmarks/cosim.py [--backend inductor] [TARGET ...]

Targets default to whole MobileBERT in inference and a training step of GPT-2 (`tests/kit/suite.py`). Each round times
an eager run, a compiled run and a cosimulation, one after the other; the ratio is that of each round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import click
import torch

from pellucid.kit.debug.simulation import COMPLETE, LIVE, simulate
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, interpret
from pellucid.kit.runs.target import Request, captured
from pellucid.kit.subjects.base import Compiled

DEFAULT = ("tests/kit/suite.py:mobilebert", "tests/kit/suite.py:gpt2_training")


@dataclass(slots=True)
class Timed:
    """Seconds of one round. results: that cosimulation compared."""

    eager: float
    compiled: float
    cosim: float
    results: int

    @property
    def ratio(self) -> float:
        return self.cosim / (self.eager + self.compiled)


def one_round(graphs: Sequence[Graph], compiled: Sequence[Compiled], mode: str) -> Timed:
    """Run graphs in the three ways, one after the other."""
    start = time.perf_counter()
    for graph in graphs:
        interpret(graph.module, copied(graph.inputs))
    after_eager = time.perf_counter()
    for graph, each in zip(graphs, compiled, strict=True):
        each.run(copied(graph.inputs))
    after_compiled = time.perf_counter()
    found = [simulate(graph, each, mode) for graph, each in zip(graphs, compiled, strict=True)]
    end = time.perf_counter()
    return Timed(after_eager - start, after_compiled - after_eager, end - after_compiled, sum(map(len, found)))


@click.command()
@click.argument("targets", nargs=-1)
@click.option("--backend", default="pellucid")
@click.option("--rounds", default=7)
def main(targets: tuple[str, ...], backend: str, rounds: int) -> None:
    """Print the ratio for each target; those named `*_training` are differentiated."""
    for target in targets or DEFAULT:
        graphs, subject = captured(Request(target, backend, backward=target.endswith("_training")))
        compiled = [subject.compile(graph) for graph in graphs]
        for mode in (COMPLETE, LIVE):
            timed = [one_round(graphs, compiled, mode) for _ in range(rounds + 1)][1:]  # the first touches fresh memory
            q1, q2, q3 = quantiles((each.ratio for each in timed), n=4)
            eager, fast = (median(each) * 1e3 for each in zip(*((t.eager, t.compiled) for t in timed), strict=True))
            print(
                f"{target} {backend} {mode}: {timed[0].results} results, {q2:.2f} [{q1:.2f}, {q3:.2f}] times one eager "
                f"({eager:.0f} ms) and one compiled run ({fast:.0f} ms)"
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
