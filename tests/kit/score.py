"""How much of the planted faults the kit finds: `python -m tests.kit.score [NAME ...]` prints a table and a total.

Each fault goes through `bisect`, whose first attempt is `check`, and, where it shows as wrong numbers of the captured
graphs, through both modes of `cosim`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.kit.debug.bisect import bisect
from pellucid.kit.debug.check import Culprit, Request, captured, step_of
from pellucid.kit.debug.cosim import COMPLETE, LIVE, cosim_graphs
from pellucid.kit.process.child import Worker
from pellucid.kit.subjects.marker import Marker
from tests.kit.planted import FAULTS, Fault

HERE = Path(__file__).parent
MEMORY = 4 << 30
KERNELS = ("codegen", "vectorisation", "lowering")
CAPTURE = ("dynamo", "aotautograd", "joint graph", "decompositions", "layout")


def request_of(fault: Fault) -> Request:
    """The fault as a target of the kit."""
    return Request(f"{HERE}/planted.py:{fault.name}", fault.subject, backward=fault.backward)


def seconds_of(fault: Fault) -> float:
    """How long an attempt may take: a hang costs all of it."""
    return 45.0 if fault.verdict == "hang" else 300.0


def shows_in_kernels(fault: Fault) -> bool:
    """Whether the result of one kernel is wrong, whatever runs around it."""
    return fault.verdict == "wrong" and fault.component in KERNELS


def shows_in_cosim(fault: Fault) -> bool:
    """Whether it is there to be seen once the graphs are captured, and has a place."""
    return fault.verdict == "wrong" and fault.component not in CAPTURE and bool(fault.culprit)


def names_it(fault: Fault, nodes: tuple[str, ...]) -> bool:
    """Whether the culprit is among FX nodes."""
    return any(fault.culprit in node for node in nodes)


@dataclass(slots=True)
class Score:
    """What each tool said, and whether that is right."""

    fault: Fault
    verdict: str = ""
    component: str = ""
    culprit: Culprit | None = None
    cosim: dict[str, tuple[str, bool]] = field(default_factory=dict)
    seconds: float = 0.0

    def wrong(self) -> Iterator[str]:
        """The tools that were wrong."""
        if self.verdict != self.fault.verdict:
            yield "check"
        if self.component != self.fault.component:
            yield "component"
        nodes = self.culprit.fx_nodes if self.culprit else ()
        if self.fault.culprit and not names_it(self.fault, nodes):
            yield "culprit"
        yield from (f"cosim {mode}" for mode, (_, right) in self.cosim.items() if not right)


def score(fault: Fault) -> Score:
    """Run the tools on a fault."""
    found, start, request = Score(fault), time.monotonic(), request_of(fault)
    bisected = bisect(request, seconds_of(fault), MEMORY, lambda _: None)
    found.verdict, found.component = bisected.checked.verdict.value, bisected.component
    found.culprit = bisected.culprit
    if shows_in_cosim(fault):
        with Worker(MEMORY) as worker:
            said = worker.call("tests.kit.score:first_divergences", request)
        for mode, node, nodes in said if isinstance(said, list) else [("both modes", str(said), ())]:
            found.cosim[mode] = (node, names_it(fault, nodes))
    found.seconds = time.monotonic() - start
    return found


def first_divergences(request: Request) -> list[tuple[str, str, tuple[str, ...]]]:
    """In a worker process: by mode, the first wrong result of `cosim`, and the nodes of the kernel that made it."""
    graphs, subject = captured(request)
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for mode in (COMPLETE, LIVE):
        first = cosim_graphs(graphs, subject, mode, Marker()).first_divergence
        steps = [step_of(subject, graph, first.kernel) for graph in graphs if first and graph.name == first.graph]
        nodes = steps[0].fx_nodes if steps and steps[0] else (first.fx_node,) if first else ()
        found.append((mode, first.fx_node if first else "nothing", nodes))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of faults")
    names = parser.parse_args().names
    chosen = [fault for name, fault in FAULTS.items() if not names or any(part in name for part in names)]
    right = 0
    for fault in chosen:
        found = score(fault)
        wrong = list(found.wrong())
        right += not wrong
        nodes = ",".join(found.culprit.fx_nodes) if found.culprit else "-"
        seen = " ".join(node for node, _ in found.cosim.values())
        expected = f"{fault.verdict} {fault.component} {fault.culprit or '-'}"
        said = f"{found.verdict} {found.component} {nodes}" + (f" cosim: {seen}" if seen else "")
        verdict = f"WRONG ({', '.join(wrong)})" if wrong else "right"
        print(f"{fault.name:42} {expected:42} {said:60} {found.seconds:5.0f} s  {verdict}", flush=True)
    print(f"{right} of {len(chosen)} right")


if __name__ == "__main__":
    main()
