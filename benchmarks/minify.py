"""`pellucid minify` beside PyTorch's own minifier, on faults planted in TorchInductor: `python benchmarks/minify.py`.

A case is a fault and a program. PyTorch's minifier takes two runs: under `TORCHDYNAMO_REPRO_AFTER=aot` the failing
program writes a launcher, and the launcher minifies; its time is that of both. Ours is that of the command. They take
turns, each with a cache folder of its own, a copy of one in which a small program was compiled: so both know the
machine's vector instructions, and neither knows a kernel. The calls of the graph that is left are counted alike: those
that FX finds in the class that the program defines. PyTorch's minifier is stopped after `--budget` seconds, or after
`--times` as long as ours took: then it is known to be slower, not what it would have found. With `--no-isolate` its
launcher tries all candidates in one process, which is faster; by default it starts one for each.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULT = "MINIFY_BENCHMARK_FAULT"
NOT_TAKEN = "it does not see that the program fails"


# ------------------------------------------------------------------------------------------------ faults


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of TorchInductor. module: that is changed, as soon as it is imported. level: `TORCHDYNAMO_REPRO_LEVEL`
    for which PyTorch's minifier takes it."""

    module: str
    level: int
    plant: Callable[[Any], None]


def printed(vector: Mapping[str, Callable[..., str]], scalar: Mapping[str, Callable[..., str]] | None = None) -> Any:
    """Change the C++ of operators."""

    def plant(module: Any) -> None:
        for owner, changes in ((module.CppVecOverrides, vector), (module.CppOverrides, scalar or {})):
            for name, text in changes.items():
                text.__name__ = name  # by which Inductor finds the scalar form of an operator
                setattr(owner, name, staticmethod(text))

    return plant


def lowered_as(op: str, other: str) -> Any:
    """Lower an operator as another."""

    def plant(module: Any) -> None:
        import torch

        module.lowerings[getattr(torch.ops.aten, op).default] = module.lowerings[getattr(torch.ops.aten, other).default]

    return plant


CPP, LOWERING = "torch._inductor.codegen.cpp", "torch._inductor.lowering"
WRONG, ERROR, CRASH = 4, 2, 3
FAULTS = {
    "neg-wrong": Fault(CPP, WRONG, printed({"neg": lambda x: f"{x}"})),
    "exp-wrong": Fault(CPP, WRONG, printed({"exp": lambda x: f"({x} * {x}).exp()"})),
    "erf-wrong": Fault(CPP, WRONG, printed({"erf": lambda x: f"{x}.tanh()"})),
    "rsqrt-wrong": Fault(
        CPP, WRONG, printed({"rsqrt": lambda x: f"{x}.sqrt()"}, {"rsqrt": lambda x: f"std::sqrt({x})"})
    ),
    "tanh-wrong": Fault(CPP, WRONG, printed({"tanh": lambda x: f"{x}.sin()"})),
    "relu-wrong": Fault(CPP, WRONG, printed({"relu": lambda x: f"{x}"}, {"relu": lambda x: f"{x}"})),
    "sigmoid-wrong": Fault(LOWERING, WRONG, lowered_as("sigmoid", "tanh")),
    "neg-error": Fault(CPP, ERROR, printed({"neg": lambda x: f"{x}.no_such_member()"})),
    "exp-error": Fault(CPP, ERROR, printed({"exp": lambda x: f"{x}.no_such_member()"})),
    "erf-error": Fault(CPP, ERROR, printed({"erf": lambda x: f"{x}.no_such_member()"})),
    "rsqrt-error": Fault(
        CPP, ERROR, printed({"rsqrt": lambda x: f"{x}.no_such()"}, {"rsqrt": lambda x: f"no_such({x})"})
    ),
    "neg-crash": Fault(CPP, CRASH, printed({"neg": lambda x: f"(*(volatile int*)nullptr = 1, {x}.neg())"})),
    "tanh-crash": Fault(CPP, CRASH, printed({"tanh": lambda x: f"(*(volatile int*)nullptr = 1, {x}.tanh())"})),
}
CASES = (
    "neg-wrong:negated",
    "exp-wrong:mixed",
    "sigmoid-wrong:mixed",
    "neg-error:negated",
    "exp-error:mixed",
    "neg-crash:negated",
    "erf-wrong:small-bert",
    "erf-error:small-bert",
    "tanh-wrong:small-gpt2",
    "rsqrt-wrong:small-t5",
    "exp-error:small-llama",
    "rsqrt-error:small-llama",
    "relu-wrong:small-resnet",
    "erf-wrong:small-vit",
    "erf-wrong:small-convnext",
    "relu-wrong:small-mobilebert",
    "erf-wrong:small-whisper",
    "exp-wrong:small-bert",
    "tanh-crash:small-gpt2",
    "relu-wrong:mobilebert",
)


class _Planting:
    """Finds modules as Python does, and changes the faulty one when it has run."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != self.fault.module:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        import importlib.util

        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.fault.plant(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def plant(name: str) -> None:
    """Let a fault take effect in this process when the module that it changes is imported."""
    fault = FAULTS[name]
    if fault.module in sys.modules:
        fault.plant(sys.modules[fault.module])
    else:
        sys.meta_path.insert(0, _Planting(fault))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ programs


def program(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """`negated` and `mixed`, functions; `small-MODEL`, with two layers; `MODEL`, at full size."""
    sys.path.insert(0, str(ROOT))
    from tests.kit import planted

    if name in ("negated", "mixed"):
        fn, args = getattr(planted, name)()
        return fn, args, {}
    if name.startswith("small-"):
        from tests.small_models import build_small

        fn, inputs = build_small(name.removeprefix("small-"))
        return fn, (), inputs
    from pellucid.kit.bench.models import build

    case = build(name)
    return case.fn, (), case.kwargs


TARGET = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from minify import program
def make():
    return program({{program!r}})
"""
RUN = """
from target import make
import torch
fn, args, kwargs = make()
with torch.no_grad():
    torch.compile(fn)(*args, **kwargs)
"""
SITE = f"""
import os, sys
if os.environ.get({FAULT!r}):
    sys.path.insert(0, {str(ROOT / "benchmarks")!r})
    from minify import plant
    plant(os.environ[{FAULT!r}])
"""


# ------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True)
class Side:
    """What one minifier did. nodes: calls that are left, -1 without a result. note: why there is none, or what else."""

    seconds: float
    nodes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """When PyTorch's minifier is stopped: after `budget` seconds, and after `times` as long as ours took, but not
    before `least` seconds."""

    budget: float
    times: float
    least: float = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A fault in a program, and what became of it. before: calls of the graph."""

    fault: str
    program: str
    before: int
    ours: Side
    stock: Side

    @property
    def ratio(self) -> float:
        """Our time in units of theirs; too large where theirs was stopped."""
        return self.ours.seconds / self.stock.seconds


def measure(fault: str, name: str, limits: Limits, warm: Path, isolate: bool = True) -> Case:
    """Both minifiers on one case."""
    with tempfile.TemporaryDirectory(prefix="minify-") as place:
        folder = Path(place)
        (folder / "target.py").write_text(TARGET.format(program=name))
        (folder / "run.py").write_text(RUN)
        (folder / "sitecustomize.py").write_text(SITE)
        for cache in ("cache-ours", "cache-stock"):
            shutil.copytree(warm, folder / cache)
        before, ours = run_ours(fault, folder)
        budget = min(limits.budget, max(limits.least, limits.times * ours.seconds))
        return Case(fault, name, before, ours, run_stock(fault, folder, budget, isolate))


def environment(fault: str, folder: Path, cache: str) -> dict[str, str]:
    """For a child that has the fault, and a cache folder of its own."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    return {**os.environ, "PYTHONPATH": path, FAULT: fault, "TORCHINDUCTOR_CACHE_DIR": str(folder / cache)}


def run_ours(fault: str, folder: Path) -> tuple[int, Side]:
    """How many calls there were, and what our minifier did."""
    start = [sys.executable, "-c", "from pellucid.cli import main; main()"]
    command = [*start, "minify", str(folder / "target.py:make"), "--backend", "inductor"]
    out, seconds, status = timed(
        [*command, "-o", str(folder / "ours"), "--json"], folder, environment(fault, folder, "cache-ours"), 1800.0
    )
    if status != 1:
        return -1, Side(seconds, -1, f"exit status {status}: {out[-300:]}")
    found = json.loads(out[out.index("{\n") :])
    note = f"{found['kind']['verdict']}, {found['queries']} queries, {found['times']}"
    return found["nodes_before"], Side(seconds, calls(folder / "ours" / "repro.py", "Graph"), note)


def run_stock(fault: str, folder: Path, budget: float, isolate: bool) -> Side:
    """What PyTorch's minifier did."""
    more = {"TORCHDYNAMO_REPRO_AFTER": "aot", "TORCHDYNAMO_REPRO_LEVEL": str(FAULTS[fault].level)}
    env = {**environment(fault, folder, "cache-stock"), **more}
    _, dumped, _ = timed([sys.executable, str(folder / "run.py")], folder, env, budget)
    launchers = sorted(folder.glob("torch_compile_debug/**/minifier_launcher.py"))
    if not launchers:
        return Side(dumped, -1, NOT_TAKEN)
    launcher = [sys.executable, str(launchers[0]), *([] if isolate else ["minify", "--no-isolate"])]
    out, seconds, status = timed(launcher, folder, env, budget - dumped)
    total = dumped + seconds
    if status is None:
        return Side(total, -1, f"no result in {budget:.0f} s")
    program = folder / "repro.py"
    if status != 0 or not program.exists():
        return Side(total, -1, f"the launcher failed: {out.strip().splitlines()[-1] if out.strip() else status}")
    made = next((line for line in reversed(out.splitlines()) if "queries" in line), "")
    return Side(total, calls(program, "Repro"), made)


def timed(command: list[str], folder: Path, env: dict[str, str], limit: float) -> tuple[str, float, int | None]:
    """What a command says, the seconds that it takes, and its exit status: None if it had to be stopped."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        seconds = time.perf_counter() - start
        out.seek(0)
        return out.read().decode(errors="replace"), seconds, status


def calls(file: Path, name: str) -> int:
    """The calls in the graph that a class of a program is."""
    import torch
    from torch import device, inf, nan, tensor

    tree = ast.parse(file.read_text())
    tree.body = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    space: dict[str, Any] = {"torch": torch, "device": device, "inf": inf, "nan": nan, "tensor": tensor}
    exec(compile(tree, str(file), "exec"), space)
    graph = torch.fx.symbolic_trace(space[name]()).graph
    return sum(node.op == "call_function" for node in graph.nodes)


# ------------------------------------------------------------------------------------------------ reporting


TITLES = f"{'fault':14} {'program':18} {'before':>6} {'ours':>5} {'stock':>5} {'ours s':>7} {'stock s':>7}   ratio"
LEGEND = """nodes of the graph before, of our smallest and of PyTorch's smallest; seconds that
each took, minutes a case; ratio of the seconds, < where theirs found nothing"""


def row(case: Case) -> str:
    """A line of the table, and below it what is to be said of PyTorch's minifier."""
    stock = f"{case.stock.nodes:5}" if case.stock.nodes >= 0 else " none"
    less = "<" if case.stock.nodes < 0 else " "
    ratio = "      -" if case.stock.note == NOT_TAKEN else f"{less}{case.ratio:6.3f}"
    note = f"\n  PyTorch's: {case.stock.note}" if case.stock.note else ""
    return (
        f"{case.fault:14} {case.program:18} {case.before:6} {case.ours.nodes:5} {stock} "
        f"{case.ours.seconds:7.1f} {case.stock.seconds:7.1f} {ratio}{note}"
    )


def main() -> None:
    """Measure every case that is named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="FAULT:PROGRAM")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for PyTorch's minifier in each case")
    parser.add_argument("--times", type=float, default=math.inf, help="as long as ours took, at most, for theirs")
    parser.add_argument("--no-isolate", action="store_true", help="one process for PyTorch's minifier")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    limits = Limits(arguments.budget, arguments.times)
    warm = tempfile.TemporaryDirectory(prefix="minify-")
    warm_up(Path(warm.name))
    print(f"{LEGEND}\n\n{TITLES}", flush=True)
    done: list[Case] = []
    for name in arguments.cases:
        fault, _, subject = name.partition(":")
        done.append(measure(fault, subject, limits, Path(warm.name), not arguments.no_isolate))
        print(row(done[-1]), flush=True)
        if arguments.json:
            cases = [{**asdict(each), "ratio": each.ratio} for each in done]
            arguments.json.write_text(json.dumps(cases, indent=1))
    both = [each for each in done if each.ours.nodes >= 0 and each.stock.nodes >= 0]
    larger = [f"{each.fault}:{each.program}" for each in both if each.ours.nodes > each.stock.nodes]
    if both:
        print(f"median ratio where both have a result ({len(both)}): {statistics.median(e.ratio for e in both):.3f}")
    taken = [each for each in done if each.ours.nodes >= 0 and each.stock.note != NOT_TAKEN]
    if taken:
        median = statistics.median(each.ratio for each in taken)
        print(f"median ratio of all that it takes ({len(taken)}), theirs as long as it ran: {median:.3f}")
    print(f"ours larger: {', '.join(larger) or 'never'}")


def warm_up(folder: Path) -> None:
    """Compile a small program: what TorchInductor finds out about the machine then is copied for each case."""
    code = "import torch; x = torch.randn(99); torch.compile(lambda x: x.sin() + x.exp().sum())(x)"
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


if __name__ == "__main__":
    main()
