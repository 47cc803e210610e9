"""Record graph breaks and recompilations of Dynamo, and whether graphs are found in the store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo import output_graph, utils

from pellucid.kit.process.child import NOT_THE_USERS
from pellucid.kit.programs import graphs
from pellucid.kit.subjects.refusals import Refusal
from pellucid.options import make_options
from pellucid.reuse import Start, consult

GRAPH_BREAK, RECOMPILATION = "graph break", "recompilation"
_MAX_COMPILATIONS = 100_000  # whose metrics Dynamo keeps; 64 by default
_TORCH = str(Path(torch.__file__).parent)
_CALLER = re.compile(r"Line: (?P<line>\d+), Name: (?P<name>.*), Filename: (?P<file>.*)")  # of Dynamo's stack traces


@contextmanager
def listening() -> Iterator[list[Refusal]]:
    """The graph breaks and recompilations in the block, each line and cause once; the list is filled at its end."""
    found: list[Refusal] = []
    breaks: list[Any] = []  # Dynamo's own list is cleared by `reset`
    utils.set_compilation_metrics_limit(_MAX_COMPILATIONS)
    utils.clear_compilation_metrics()
    try:
        with mock.patch.object(output_graph, "graph_break_reasons", breaks):
            yield found
    finally:
        found += dict.fromkeys((*_breaks(breaks), *_skipped(), *_recompilations()))


@contextmanager
def starting(backend: str, options: Mapping[str, object]) -> Iterator[list[Start]]:
    """Whether the store has the graphs that Pellucid captures in the block."""
    found: list[Start] = []
    capture = graphs.capture_with_aot

    def consulting(module: torch.fx.GraphModule, inputs: Sequence[Any], **rest: Any) -> Callable[..., Any]:
        if backend == "pellucid":
            found.append(consult(module, inputs, make_options(options)))
        return capture(module, inputs, **rest)

    with mock.patch.object(graphs, "capture_with_aot", consulting):
        yield found


def _breaks(reasons: Sequence[Any]) -> Iterator[Refusal]:
    for each in reasons:
        if each.graph_break:
            frames = [frame for frame in each.user_stack if not frame.filename.startswith(_TORCH)] or each.user_stack
            line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            yield Refusal(GRAPH_BREAK, (), _sentence(each.reason), (), line)


def _skipped() -> Iterator[Refusal]:
    """Functions that Dynamo skips entirely, for example because a graph would break inside a loop."""
    for each in utils.get_compilation_metrics():
        if each.fail_type == "Unsupported" and each.fail_reason:
            name, start = _compiled(each)
            file, number = each.fail_user_frame_filename, each.fail_user_frame_lineno
            line = f"{file}:{number}" if file and not file.startswith(_TORCH) else start
            yield Refusal(GRAPH_BREAK, (name,) if name else (), _sentence(each.fail_reason), (), line)


def _recompilations() -> Iterator[Refusal]:
    for each in utils.get_compilation_metrics():
        if each.recompile_reason:
            name, line = _compiled(each)
            yield Refusal(RECOMPILATION, (name,) if name else (), _sentence(each.recompile_reason), (), line)


def _compiled(metrics: Any) -> tuple[str, str]:
    """The compiled function and its first line; for a function of PyTorch, its caller in the user's code."""
    if metrics.co_filename and not metrics.co_filename.startswith(_TORCH):
        return metrics.co_name or "", f"{metrics.co_filename}:{metrics.co_firstlineno}"
    frames = [_CALLER.fullmatch(frame) for frame in metrics.stack_trace or ()]
    users = [found for found in frames if found and not found["file"].startswith(NOT_THE_USERS)]
    return (f"called by {users[-1]['name']}", f"{users[-1]['file']}:{users[-1]['line']}") if users else ("", "")


def _sentence(text: str) -> str:
    """The first paragraph, on one line; the rest is advice for Dynamo's developers."""
    return " ".join(text.strip().split("\n\n")[0].split())
