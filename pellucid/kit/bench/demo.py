"""The demonstration: MobileBERT under eager, Inductor and Pellucid, and a run folder to explore."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pellucid.kit.bench.harness import Progress, Settings, bench
from pellucid.kit.bench.models import build
from pellucid.kit.bench.results import Report
from pellucid.kit.bench.subjects import PELLUCID
from pellucid.trace.schema import FILES, GRAPH_FILES, GRAPHS, RUN


@dataclass(frozen=True, slots=True)
class Demo:
    """The measurements and the run folder, which is None if Pellucid failed."""

    report: Report
    folder: Path | None


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file or folder of a run (`count` with this name, one per graph) and a line on its content."""

    path: Path
    meaning: str
    count: int = 1


def demo(folder: Path, model: str = "mobilebert", budget: float = 20.0, progress: Progress | None = None) -> Demo:
    """Measure `model` side by side in this process, and write its trace into `folder`."""
    tell = progress or (lambda doing, done: None)
    report = bench([model], Settings(budget=budget, cold=False), lambda doing, done: tell(doing, 0.9 * done))
    if any(s.name == PELLUCID and s.failure for m in report.models for s in m.subjects):
        return Demo(report, None)
    tell(f"writing the run folder {folder}", 0.9)
    write_run(model, folder)
    tell("done", 1.0)
    return Demo(report, folder)


def write_run(model: str, folder: Path) -> None:
    """Compile `model` with Pellucid once more, with tracing enabled, and call it once."""
    folder.mkdir(parents=True, exist_ok=True)
    case = build(model)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(case.fn, backend=PELLUCID, options={"trace": str(folder)})(**case.kwargs)


def explained(folder: Path) -> Iterator[RunFile]:
    """The existing files of a run, in the order in which to read them."""
    every = {RUN: FILES[RUN], **GRAPH_FILES, **FILES}
    del every[GRAPHS]  # its files are listed one by one
    for name, meaning in every.items():
        if found := sorted(folder.rglob(name)):
            yield RunFile(found[0].relative_to(folder), meaning, len(found))
