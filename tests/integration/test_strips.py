"""Chains of kernels that run strip by strip: the same bits, and where it is allowed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.debug import Program
from pellucid.executable import INSTANCES, Sized
from pellucid.kit.programs.case import Case
from pellucid.kit.subjects.base import Probe, Step
from pellucid.kit.subjects.clock import clock
from pellucid.kit.subjects.registry import subject_of
from pellucid.machine.model import to_text
from pellucid.native.machine import machine_for
from pellucid.strips import Chain
from tests.support import assert_matches, images, randn, tensors, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

Function = Callable[..., Any]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine of three cores whose second caches hold 32 kB: what tests compute leaves them."""
    sizes = {"l1": 1 << 10, "l2": 32 << 10, "l3": 8 << 20}
    machine = machine_for("reference")
    levels = tuple(replace(each, size=sizes.get(each.name, 0)) for each in machine.levels)
    file = tmp_path_factory.mktemp("machine") / "small.json"
    file.write_text(to_text(replace(machine, cores=3, barrier=20.0, call=1.0, levels=levels)))
    return file


class Block(nn.Module):
    """An inverted residual: the wide tensors in its middle are what strips keep near."""

    def __init__(self, channels: int, to: int, stride: int = 1) -> None:
        super().__init__()
        wide = 4 * channels
        self.up, self.down = nn.Conv2d(channels, wide, 1), nn.Conv2d(wide, to, 1)
        self.each = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide)
        self.residual = stride == 1 and channels == to

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu6(self.each(F.relu6(self.up(x)))))
        return x + y if self.residual else y


class Branches(nn.Module):
    """What several layers read, pooled and joined; some of it is a result as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.last = nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(self.first(x))
        z = self.second(y)
        joined = torch.cat([z.sigmoid(), y], 1)
        return self.last(joined), F.max_pool2d(z, 3, 2, 1), y.mean((2, 3)), z


class Depthwise(nn.Module):
    """No weight that is packed: it runs in strips however that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1, groups=16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)


class Products(nn.Module):
    """Products of many rows with small weights; `made` of their two weights."""

    def __init__(self, made: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(randn(16, 64) / 4), nn.Parameter(randn(64, 16) / 8)
        self.made = made
        self.to(dtype)

    def forward(self, x: Tensor) -> Any:
        return self.made(x, self.up, self.down)


def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.relu(F.relu(x @ up) @ down) @ up


def overwritten(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = F.gelu(x @ up) @ down
    x.add_(y)
    return F.relu(x @ up) @ down


def rows(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.layer_norm(x, x.shape[-1:]) @ up).softmax(-1) @ down


def turned(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The last rows of what is made are read first."""
    return F.relu(x @ up).flip(0) @ down


def blocks(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), Block(8, 8), Block(8, 16, 2), Block(16, 16), nn.ReLU())
    return made.eval().to(dtype)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "one image": (blocks, images(1, 3, 192, 192)),
    "five images": (blocks, images(5, 3, 100, 92)),
    "planes": (blocks, randn(2, 3, 150, 150)),
    "bf16": (lambda: blocks(dtype=torch.bfloat16), images(2, 3, 192, 192, dtype=torch.bfloat16)),
    "branches": (lambda: Branches().eval(), images(4, 3, 64, 64)),
    "depthwise": (lambda: Depthwise().eval(), images(2, 16, 200, 16)),
    "layers": (lambda: Products(layers), randn(5000, 16)),
    "layers of bf16": (lambda: Products(layers, torch.bfloat16), randn(5000, 16, dtype=torch.bfloat16)),
    "overwritten": (lambda: Products(overwritten), randn(5000, 16)),
    "rows": (lambda: Products(rows), randn(7777, 16)),
    "turned": (lambda: Products(turned), randn(5000, 16)),
}


def compiled(function: Function, small: Path, **options: Any) -> Function:
    torch._dynamo.reset()
    given = {"machine": str(small), "reuse": False, "verify": True, **options}
    return torch.compile(function, backend="pellucid", options=given)


def called(function: Function, x: Tensor) -> tuple[list[Tensor], list[Sized]]:
    """The results, with what has become of the argument; and the instances that were made."""
    known, given = set(INSTANCES), x.clone()
    with torch.no_grad():
        results = tensors(function(given))
    return [*results, given], [INSTANCES[number] for number in set(INSTANCES) - known]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def chains(made: list[Sized]) -> list[Chain]:
    return [chain for each in made for chain in each.plan.chains]


@pytest.mark.sampled
@pytest.mark.parametrize("freeze", [False, True], ids=["default", "frozen"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str, freeze: bool, small: Path) -> None:
    make, x = CASES[name]
    model = make()
    plain, _ = called(compiled(model, small, freeze=freeze, strips=False), x)
    run = compiled(model, small, freeze=freeze)
    results, made = called(run, x)
    assert same(results, plain) and same(called(run, x)[0], plain)
    joined = name == "branches"  # of what is joined several kernels write a part each, which no chain has
    if (freeze and not joined) or name == "depthwise":  # blocks that pack are as many as threads
        assert chains(made)
    assert all(len(chain.parts) == 3 for chain in chains(made))
    assert_matches(results, called(model, x)[0], called(model.double(), widened(x))[0])


def test_special_values_stay_where_they_are(small: Path) -> None:
    x = images(2, 3, 192, 192)
    x[0, :, 20, 30], x[1, :, 0, 0], x[1, :, -1, -1] = torch.nan, torch.inf, -torch.inf
    model = blocks()
    plain, _ = called(compiled(model, small, freeze=True, strips=False), x)
    strips, made = called(compiled(model, small, freeze=True), x)
    assert chains(made)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(plain, strips, strict=True))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_other_numbers_of_threads(count: int, small: Path) -> None:
    model, x = CASES["depthwise"][0](), CASES["depthwise"][1]
    run = compiled(model, small)
    expected, _ = called(run, x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        assert same(called(run, x)[0], expected)
    finally:
        torch.set_num_threads(before)


def test_several_calls_at_once(small: Path) -> None:
    make, x = CASES["depthwise"]
    run = compiled(make(), small)
    inputs = [x * scale for scale in (1.0, 2.0, 3.0)]
    expected = [called(run, each)[0] for each in inputs]

    def repeat(number: int) -> bool:
        return all(same(called(run, inputs[number])[0], expected[number]) for _ in range(30))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(repeat, range(3)))


def test_temporaries_take_less_room(small: Path) -> None:
    make, x = CASES["depthwise"]
    arenas: list[int] = []
    for strips in (False, True):
        _, made = called(compiled(make(), small, freeze=True, strips=strips), x)
        arenas.append(max(each.plan.memory.arena_bytes for each in made if each.plan.memory))
    assert arenas[1] * 4 < arenas[0], arenas


def test_the_time_of_each_call_is_known(small: Path) -> None:
    make, x = CASES["depthwise"]
    model = make()
    torch._dynamo.reset()
    timed = subject_of("pellucid", {"machine": str(small)}).clocked(model)
    with torch.no_grad():
        for _ in range(3):
            timed(x)
        with clock() as taken:
            timed(x)
    (run,) = taken.runs
    times = [step.time for step in run.steps]
    assert len(times) == 3 and all(each is not None and each.end > each.begin for each in times)


def test_profilers_see_a_chain_as_one_call(small: Path) -> None:
    make, x = CASES["depthwise"]
    run = compiled(make(), small, freeze=True)
    called(run, x)
    with torch.profiler.profile() as seen:
        called(run, x)
    names = [event.key for event in seen.key_averages() if "pellucid::" in event.key and "/" in event.key]
    assert len(names) == 1 and " to " in names[0], names


def test_what_has_a_window_is_not_written_past_the_caches(small: Path, tmp_path: Path) -> None:
    """Products of many rows: a copy that moves twice what the last cache holds would be."""

    def padded(x: Tensor, up: Tensor, _: Tensor) -> Tensor:
        return F.relu(F.pad(x, (0, 0, 3, 3)) @ up)

    model, x = Products(padded), randn(150_000, 16)
    plain, _ = called(compiled(model, small, freeze=True, strips=False, trace=str(tmp_path / "off")), x)
    strips, made = called(compiled(model, small, freeze=True, trace=str(tmp_path / "on")), x)
    assert same(plain, strips) and [chain.first for chain in chains(made)] == [0]
    streamed = {
        each: sum("pv::stream_end" in file.read_text() for file in (tmp_path / each).glob("*/kernels/*.cpp"))
        for each in ("off", "on")
    }
    assert streamed["on"] == streamed["off"] - 1, "all but the result"


def test_a_chain_that_cannot_be_walked_leaves_room_for_others(small: Path, tmp_path: Path) -> None:
    """What `flip` reads first is made last: the chain that would save most is none, and a shorter one is taken."""
    make, x = CASES["turned"]
    _, made = called(compiled(make(), small, freeze=True, trace=str(tmp_path)), x)
    table = next(tmp_path.glob("*/decisions.csv")).read_text()
    assert chains(made) and "some strip needs iterations before those of the first strip" in table


def test_what_is_observed_runs_call_by_call(small: Path) -> None:
    """Each intermediate is there, whole, after its call."""
    make, x = CASES["depthwise"]
    torch._dynamo.reset()
    program = Program(make(), (x,), options={"machine": str(small)})
    assert program.cosim().good


class Marks(Probe):
    """What looks at no results."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def before(self, step: Step) -> None:
        self.found.append(step.name)


@pytest.mark.parametrize("probe", [None, Marks()])
def test_what_only_marks_steps_runs_in_strips(probe: Marks | None, small: Path) -> None:
    """So that a check of results, and a bisection, run what users run."""
    make, x = CASES["depthwise"]
    subject = subject_of("pellucid", {"machine": str(small)})
    with torch.no_grad():
        (graph,) = subject.graphs(Case("depthwise", make(), (x,)))
    run = subject.compile(graph)
    with torch.profiler.profile() as seen:
        run.run(graph.inputs, probe)
    assert any(" to " in event.key for event in seen.key_averages() if "pellucid::" in event.key)
    assert probe is None or sorted(probe.found) == sorted(step.name for step in run.steps)


@pytest.mark.sampled
def test_the_program_of_a_run_runs_call_by_call(small: Path, tmp_path: Path) -> None:
    make, x = CASES["depthwise"]
    _, made = called(compiled(make(), small, freeze=True, trace=str(tmp_path)), x)
    assert chains(made)
    (program,) = tmp_path.glob("*/graphs/inference_*/output_code.py")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (plan,) = tmp_path.glob("*/graphs/*/execution_plan.txt")
    assert "strips of calls 0 to 2, 3 parts, " in plan.read_text()


def test_sizes_that_change_run_call_by_call(small: Path) -> None:
    make, x = CASES["depthwise"]
    torch._dynamo.reset()
    run = torch.compile(make(), backend="pellucid", dynamic=True, options={"machine": str(small), "reuse": False})
    for count in (160, 200):
        assert not chains(called(run, x[:, :, :count])[1])


def test_training(small: Path) -> None:
    """Gradients too are the same bits."""
    found: list[list[Tensor]] = []
    for strips in (False, True):
        model, x = blocks(), images(2, 3, 64, 64).requires_grad_()
        compiled(model, small, strips=strips)(x).square().sum().backward()
        assert x.grad is not None
        found.append([x.grad, *(each.grad for each in model.parameters() if each.grad is not None)])
    assert same(*found)


def test_why_not(small: Path, tmp_path: Path) -> None:
    make, x = CASES["branches"]
    called(compiled(make(), small, freeze=True, trace=str(tmp_path)), x)
    (table,) = tmp_path.glob("*/decisions.csv")
    refused = [line for line in table.read_text().splitlines() if "plan.strips" in line and ",0," in line]
    assert any("later calls read their results" in line for line in refused), refused
