"""Kernels in several ways: calls find the fastest, and every way gives the same bits."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.backend import variants
from pellucid.errors import UserError
from pellucid.native import trials
from pellucid.options import make_options


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No earlier trial counts. One thread, so that calls count also while others want the cores."""
    before, machine = torch.get_num_threads(), tmp_path / f"machine-{uuid.uuid4().hex}.json"
    monkeypatch.setattr(trials, "machine_file", lambda: machine)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], which: str = "on", **options: object) -> Callable[..., Any]:
    """As a new process would."""
    torch._dynamo.reset()
    return torch.compile(function, backend="pellucid", dynamic=False, options={"variants": which, **options})


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return all(same(one, other) for one, other in zip(found, expected, strict=True))


def until(done: Callable[[], bool], call: Callable[[], None], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        call()


def permuted(x: Tensor) -> Tensor:
    return x.permute(1, 0, 2).contiguous().exp()


def test_calls_choose_and_the_next_process_knows() -> None:
    x = torch.randn(24, 40, 64)
    expected = compiled(permuted, "off")(x)
    run = compiled(permuted)
    known = len(variants())

    def call() -> None:
        assert torch.equal(run(x), expected)

    call()
    (pending,) = variants()[known:]
    assert not pending.ok and "are being tried" in pending.why
    until(lambda: variants()[-1].ok, call)
    (chosen,) = variants()[known:]
    facts = dict(chosen.facts)
    assert chosen.ok and str(facts["fastest"]) in str(facts["kernels"]).split() and int(facts["pairs"]) >= 9
    run = compiled(permuted)
    call()
    assert variants()[-1].ok and "as an earlier process found out" in variants()[-1].why
    assert dict(variants()[-1].facts) == facts


def test_each_of_them_can_be_forced() -> None:
    x = torch.randn(24, 40, 64)
    run = compiled(permuted)
    run(x)
    ways = str(dict(variants()[-1].facts)["kernels"]).split()
    assert len(ways) == 4
    known = variants()
    results = [compiled(permuted, which)(x) for which in (*ways, *map(str, range(4)))]
    assert same(results, [results[0]] * 8)
    assert variants()[len(known) :] == [], "nothing is tried"


def test_a_kernel_in_place_is_tried_without_copies() -> None:
    def double(x: Tensor, y: Tensor) -> None:
        x.mul_(y[:, None])

    x, y = torch.ones(64, 1000), torch.full((64,), -1.0)
    run, calls = compiled(double), 0

    def call() -> None:
        nonlocal calls
        run(x, y)
        calls += 1
        assert (x == (-1) ** calls).all()

    call()
    assert not variants()[-1].ok
    until(lambda: variants()[-1].ok, call)
    assert variants()[-1].ok and calls > 8


def test_sizes_that_are_not_known_are_not_tried(tmp_path: Path) -> None:
    run = compiled(permuted, trace=str(tmp_path))
    torch._dynamo.reset()
    run = torch.compile(permuted, backend="pellucid", dynamic=True, options={"variants": "on", "trace": str(tmp_path)})
    known = len(variants())
    run(torch.randn(24, 40, 64))
    assert variants()[known:] == []
    (decision,) = rows(tmp_path, "codegen.variants")
    assert decision["ok"] == "0" and "sizes are not known" in decision["why"]


def rows(folder: Path, rule: str) -> list[dict[str, str]]:
    (path,) = folder.glob("*/decisions.csv")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["rule"] == rule]


def test_the_run_has_the_ways_their_times_and_the_choice(tmp_path: Path) -> None:
    x = torch.randn(24, 40, 64)
    run = compiled(permuted, trace=str(tmp_path))
    run(x)
    (built,) = rows(tmp_path, "codegen.variants")
    names = [fact.partition("=")[0] for fact in built["facts"].split("; ")]
    assert built["ok"] == "1" and len(names) == 4
    assert {path.stem for path in tmp_path.glob("*/kernels/*.cpp")} == set(names)
    assert [row["ok"] for row in rows(tmp_path, trials.VARIANT)] == ["0"]
    until(lambda: variants()[-1].ok, lambda: run(x))
    pending, chosen = rows(tmp_path, trials.VARIANT)
    assert pending["ok"] == "0" and chosen["ok"] == "1" and all(f"{name} " in chosen["why"] for name in names)
    assert chosen["fx_nodes"] and chosen["user_lines"].startswith(__file__)


PROGRAM = """
    import json, sys, time, torch
    from pellucid import backend
    torch.set_num_threads(1)
    x = torch.randn(24, 40, 64)

    def function(x):
        return x.permute(1, 0, 2).contiguous().exp() * FACTOR

    options = {"reuse": True, "variants": "on"}
    run = torch.compile(function, backend="pellucid", dynamic=False, options=options)
    run(x)
    first = backend.variants()[-1].ok
    end = time.monotonic() + 120
    while not backend.variants()[-1].ok and time.monotonic() < end:
        run(x)
    (decision,) = backend.variants()
    print(json.dumps([backend.last_starts()[-1].outcome, first, decision.ok, dict(decision.facts)]))
"""


@pytest.mark.sampled
def test_a_second_process_tries_nothing(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM).replace("FACTOR", str(1 + uuid.uuid4().int % 10**6 / 10**6)))

    def printed() -> Any:
        return json.loads(subprocess.check_output([sys.executable, file], text=True))

    (outcome, at_once, chosen, facts), second = printed(), printed()
    assert (outcome, at_once, chosen) == ("missed", False, True)
    assert second == ["found", True, True, facts]


# ------------------------------------------------------------------------------------------------ bits


def conv(**how: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(F.conv2d, **how)


def gradients(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def run(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [arg.detach().requires_grad_() for arg in args]
        return torch.autograd.grad(function(*leaves).sin().sum(), leaves)

    return run


def image(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


r = torch.randn
BITS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "permuted": (lambda x: x.permute(2, 0, 1).contiguous().exp(), (r(30, 45, 70),)),
    "permuted_bf16": (lambda x: x.permute(1, 0, 2).contiguous().exp(), (r(30, 45, 70).bfloat16(),)),
    "permuted_bytes": (lambda x: x.permute(1, 0, 2).contiguous() + 1, (torch.randint(0, 9, (30, 45, 70)).byte(),)),
    "transposed": (lambda x, y: x.t() + y.exp(), (r(300, 200), r(200, 300))),
    "two_orders": (lambda x: (x.exp(), (x + 1).t().contiguous()), (r(200, 300),)),
    "columns": (lambda x: (x.sum(0), x.amax(0), x.argmax(0)), (r(100, 333),)),
    "middle": (lambda x: x.exp().sum(1), (r(20, 70, 130),)),
    "softmax": (lambda x: x.softmax(0), (r(100, 333),)),
    "softmax_transposed": (lambda x: x.softmax(0).t().contiguous(), (r(100, 333),)),
    "integers": (lambda x: x.sum((0, 2)), (torch.randint(0, 1000, (40, 50, 60)),)),
    "outer": (lambda x, y: x.exp()[:, None] * y.tanh(), (r(333), r(444))),
    "doubles": (lambda x: x.permute(1, 0, 2).contiguous().sin(), (r(30, 45, 70).double(),)),
    "rows_of_many_orders": (lambda x: x.permute(3, 1, 0, 2).contiguous(), (r(8, 10, 12, 40),)),
    "product": (lambda x, w: F.linear(x, w).relu(), (r(64, 300), r(256, 300))),
    "product_of_few_rows": (F.linear, (r(12, 515), r(200, 515))),
    "product_row_by_row": (torch.mm, (r(300, 200), r(200, 96))),
    "product_of_shared_rows": (F.linear, (r(196, 384), r(384, 384))),
    "product_bf16": (F.linear, (r(64, 300).bfloat16(), r(256, 300).bfloat16())),
    "products": (torch.bmm, (r(3, 100, 70), r(3, 70, 90))),
    "product_gradients": (gradients(F.linear), (r(100, 300), r(200, 300))),
    "convolution": (conv(padding=1, stride=2), (image(2, 32, 29, 29), r(64, 32, 3, 3))),
    "convolution_by_tiles": (conv(padding=1), (image(1, 64, 28, 28), r(64, 64, 3, 3))),
    "convolution_by_channel": (conv(padding=1, groups=32), (image(2, 32, 30, 30), r(32, 1, 3, 3))),
    "convolution_of_groups": (conv(padding=1, groups=4), (image(2, 32, 30, 30), r(64, 8, 3, 3))),
    "convolution_gradients": (gradients(conv(padding=1, stride=2)), (image(2, 32, 29, 29), r(64, 32, 3, 3))),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("name", BITS)
def test_every_way_gives_the_same_bits(name: str) -> None:
    function, args = BITS[name]
    first = compiled(function, "0")(*args)
    for which in ("1", "2", "3"):
        assert same(compiled(function, which)(*args), first), which


def test_frozen_products_are_tried_with_the_panels_that_they_share() -> None:
    layer, x = nn.Linear(384, 384), torch.randn(196, 384)
    with torch.no_grad():
        run = compiled(layer, freeze=True)
        first = run(x)
        for _ in range(20):
            assert torch.equal(run(x), first)
        assert all(torch.equal(compiled(layer, str(which), freeze=True)(x), first) for which in range(4))


@pytest.mark.parametrize(
    ("given", "meant"), [(True, "on"), (False, "off"), (2, "2"), ("off", "off"), ("k_a,k_b", "k_a,k_b")]
)
def test_what_the_option_takes(given: object, meant: str) -> None:
    assert make_options({"variants": given}).variants == meant


@pytest.mark.parametrize("given", ["ON", "maybe", -1, None, 1.5])
def test_what_the_option_does_not_take(given: object) -> None:
    with pytest.raises(UserError, match="variants"):
        make_options({"variants": given})
