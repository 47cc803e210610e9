"""How compile time grows with the graph: `python benchmarks/scale.py --help`.

Each graph is compiled in a process of its own on an empty kernel store, and
its first result is timed. The table shows the seconds of Dynamo, of
AOTAutograd and of each of Pellucid's stages, the CPU seconds of all processes,
and in the last columns how many times as much as at the size before: 2 is
linear where sizes double. `--backend` compares with what another backend takes
in all (`aot_eager` is PyTorch's own part and nothing else).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

STAGES = ("transform", "lower", "schedule", "codegen", "build", "load")
COLUMNS = ("dynamo", "aot", *STAGES, "call")
SIZES = (1250, 2500, 5000, 10000, 20000)
TIMEOUT_S = 1800

Built = tuple[Callable[..., Any], list[Any]]


def chain(nodes: int) -> Built:
    """`x = x.sin() + 1`, again and again."""
    import torch

    def run(x):
        for _ in range(nodes // 2):
            x = x.sin() + 1.0
        return x

    return run, [torch.randn(64, 64)]


def shared(nodes: int) -> Built:
    """A chain of cheap values, each of which a running sum wants as well."""
    import torch

    def run(x):
        total = x
        for k in range(nodes // 2):
            x = x * (1.0 + 1.0 / (k + 1))
            total = total + x
        return x, total

    return run, [torch.randn(64, 64)]


def kept(nodes: int) -> Built:
    """A chain of cheap values, each of which a matrix product wants as well, so that all must reach memory."""
    import torch

    def run(x, w):
        y = x
        for _ in range(nodes // 3):
            x = x + 1.0
            y = torch.mm(y, w) + x
        return x, y

    return run, [torch.randn(16, 16), torch.randn(16, 16)]


def transformer(nodes: int) -> Built:
    """Encoder layers written with plain operators: equal shapes, different weights."""
    import torch
    from torch.nn import functional

    width, heads, length, per_layer = 32, 2, 16, 32
    layers = max(1, nodes // per_layer)
    shapes = [(width, width)] * 4 + [(2 * width, width), (width, 2 * width), (width,), (width,)]
    weights = torch.nn.ParameterList(
        [torch.nn.Parameter(0.1 * torch.randn(shape), requires_grad=False) for _ in range(layers) for shape in shapes]
    )

    def split(x):
        return x.view(1, length, heads, width // heads).transpose(1, 2)

    def run(x):
        for layer in range(layers):
            q, k, v, o, up, down, first, second = [weights[8 * layer + i] for i in range(8)]
            q, k, v = (split(functional.linear(x, w)) for w in (q, k, v))
            scores = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
            mixed = (scores @ v).transpose(1, 2).reshape(1, length, width)
            x = functional.layer_norm(x + functional.linear(mixed, o), (width,), first)
            hidden = functional.gelu(functional.linear(x, up))
            x = functional.layer_norm(x + functional.linear(hidden, down), (width,), second)
        return x

    return run, [torch.randn(1, length, width)]


def wide(nodes: int) -> Built:
    """Independent branches from one input, joined by a tree of sums."""
    import torch

    def run(x):
        branches = [(x * (1.0 + k)).sin() for k in range(nodes // 3)]
        while len(branches) > 1:
            pairs = zip(branches[::2], branches[1::2], strict=False)
            branches = [a + b for a, b in pairs] + ([branches[-1]] if len(branches) % 2 else [])
        return branches[0]

    return run, [torch.randn(64, 64)]


def cat(nodes: int) -> Built:
    """Independent branches from one input, joined by one concatenation."""
    import torch

    def run(x):
        return torch.cat([(x * (1.0 + k)).sin() for k in range(nodes // 2)])

    return run, [torch.randn(2, 64)]


def distinct(nodes: int) -> Built:
    """Stretches of operators between matrix products, no two of them alike."""
    import torch

    words = (torch.sin, torch.cos, torch.tanh, torch.exp, torch.neg, torch.abs, torch.sigmoid, torch.relu)
    draw = random.Random(0)
    stretches = [[draw.choice(words) for _ in range(9)] for _ in range(max(1, nodes // 10))]

    def run(x, w):
        for stretch in stretches:
            x = torch.mm(x, w)
            for word in stretch:
                x = word(x)
        return x

    return run, [torch.randn(16, 16), torch.randn(16, 16)]


FAMILIES: dict[str, Callable[[int], Built]] = {
    make.__name__: make for make in (chain, shared, kept, transformer, wide, cat, distinct)
}


def measure(family: str, nodes: int, backend: str) -> dict[str, float]:
    """Compile one graph in this process; seconds by column, the number of FX nodes and the peak memory in MB."""
    import torch

    function, inputs = FAMILIES[family](nodes)
    sys.setrecursionlimit(10**6)
    entered: list[float] = []
    torch._dynamo.reset()
    resident, before = _peak_kb(), process_time()
    start = perf_counter()
    with torch.no_grad():
        torch.compile(function, backend=_timed(backend, entered), fullgraph=True, dynamic=False)(*inputs)
    total = perf_counter() - start
    cpu = process_time() + _usage(resource.RUSAGE_CHILDREN) - before
    figures = {"total": total, "cpu": cpu, "dynamo": entered[0] - start, "mb": (_peak_kb() - resident) / 1024}
    if backend == "pellucid":
        from pellucid.backend import last_compilations

        (made,) = last_compilations()
        figures |= made.seconds
        figures |= {"nodes": made.nodes, "kernels": made.kernels, "distinct": made.distinct}
        figures["aot"] = entered[1] - entered[0] - sum(made.seconds.values())
        figures["call"] = start + total - entered[1]
    return figures


def _timed(backend: str, entered: list[float]) -> Callable[..., Any]:
    """The backend, with the time at which it begins and ends noted in `entered`."""
    from torch._dynamo import lookup_backend

    inner = lookup_backend(backend)

    def compile_timed(graph: Any, inputs: Any) -> Any:
        entered.append(perf_counter())
        compiled = inner(graph, inputs)
        entered.append(perf_counter())
        return compiled

    return compile_timed


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _usage(who: int) -> float:
    """CPU seconds that have been used."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def in_child(family: str, nodes: int, backend: str) -> dict[str, float] | str:
    """`measure` in a fresh process with an empty store; the last line of what it said when it fails."""
    with tempfile.TemporaryDirectory(prefix="pellucid-scale-") as store:
        environment = {**os.environ, "PELLUCID_CACHE_DIR": store, "TORCHINDUCTOR_CACHE_DIR": store}
        command = [sys.executable, __file__, family, "--sizes", str(nodes), "--backend", backend, "--child"]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"no result within {TIMEOUT_S} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
    return json.loads(lines[-1]) if done.returncode == 0 else lines[-1]


def report(families: list[str], sizes: list[int], backends: list[str]) -> None:
    """One table per family, a line as soon as it is known."""
    others = [backend for backend in backends if backend != "pellucid"]
    head = (
        "nodes",
        "kernels",
        "distinct",
        *COLUMNS,
        "total",
        "cpu",
        "ours",
        "MB",
        "x total",
        "x cpu",
        "x ours",
        *others,
    )
    for family in families:
        print(f"\n{family}: {(FAMILIES[family].__doc__ or '').strip()}")
        print(" ".join(f"{name:>9}" for name in head), flush=True)
        last: dict[str, float] = {}
        for nodes in sizes:
            row = in_child(family, nodes, "pellucid")
            if isinstance(row, str):
                print(f"{nodes:>9} {row}", flush=True)
                continue
            row["ours"] = sum(row[stage] for stage in STAGES)
            cells = [f"{row[name]:9.0f}" for name in ("nodes", "kernels", "distinct")]
            cells += [f"{row[name]:9.2f}" for name in (*COLUMNS, "total", "cpu", "ours")] + [f"{row['mb']:9.0f}"]
            cells += [f"{row[name] / last[name]:9.2f}" if last else f"{'':9}" for name in ("total", "cpu", "ours")]
            for backend in others:
                other = in_child(family, nodes, backend)
                cells.append(f"{other if isinstance(other, str) else format(other['total'], '9.2f')}")
            print(" ".join(cells), flush=True)
            last = row


def main() -> None:
    """Read the arguments; a child measures one graph, the parent reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--backend", action="append", default=[], help="a torch.compile backend to compare with")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.families[0], given.sizes[0], given.backend[0])))
    else:
        report(given.families, given.sizes, given.backend)


if __name__ == "__main__":
    main()
