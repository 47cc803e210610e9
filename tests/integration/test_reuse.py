"""Programs that an earlier process compiled: found with all that decides what they are, and right when they run."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  registers the operators of experts
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing._internal.two_tensor import TwoTensor

from pellucid import backend, profile, reuse
from pellucid.backend import last_compilations, last_starts
from pellucid.machine import AVX512
from pellucid.native.build import default_store
from pellucid.native.inventory import contents
from pellucid.native.store import KernelStore
from pellucid.native.toolchain import detect
from pellucid.options import Options
from pellucid.reuse import Start, parts_of
from tests.support import assert_matches, tensors, widened

OWN_SOURCES = reuse._own_sources.__wrapped__


@pytest.fixture(autouse=True)
def no_earlier_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that other tests left in the store counts."""
    mark, headers = uuid.uuid4().hex, KernelStore.headers

    def of_this_test(store: KernelStore) -> Iterator[dict[str, Any]]:
        return (about for about in headers(store) if about.get("versions", {}).get("Pellucid") == mark)

    monkeypatch.setattr(reuse, "_own_sources", lambda: mark)
    monkeypatch.setattr(KernelStore, "headers", of_this_test)
    outcomes()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], dynamic: bool | None = False, **options: object) -> Any:
    """As a new process would: Dynamo knows nothing of what was compiled."""
    torch._dynamo.reset()
    return torch.compile(function, backend="pellucid", dynamic=dynamic, options={"reuse": True, **options})


_seen: list[Start] = []  # the last one


def outcomes() -> list[str]:
    """Since the last call."""
    told = last_starts()
    new = list(itertools.takewhile(lambda start: not any(start is one for one in _seen), reversed(told)))
    _seen[:] = told[-1:]
    return [start.outcome for start in reversed(new)]


def nothing_compiles(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was compiled again")


@pytest.fixture
def found_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on nothing can be traced or compiled."""

    def forbid() -> None:
        for name in ("capture_with_aot", "compile_graph"):
            monkeypatch.setattr(backend, name, nothing_compiles)

    return forbid


def kept() -> Path:
    """Where the store has what the last program was compiled to; others may be at work in it."""
    (path,) = (default_store().directory / "programs").glob(f"{last_starts()[-1].key}-*")
    return path


# ------------------------------------------------------------------------------------------------ values


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_place(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y[1:].mul_(x[0])
    return x @ y


def aliased(x: Tensor) -> tuple[Tensor, ...]:
    z = x * 2
    return x.view(-1), z, z.t(), x[0]


def with_calls(x: Tensor) -> Tensor:
    order = torch.nonzero(x.sum(1) > 0).squeeze(1)
    return x[order].cumsum(0).softmax(-1)


def experts(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)


def windowed(least: int) -> Callable[[Tensor], Tensor]:
    blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < least), None, None, 64, 64, device="cpu")
    return lambda x: flex_attention(x, x + 1, x * 2, lambda s, b, h, i, j: s - (i - j) * 0.5, blocks)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape)


INFERENCE = {
    "pointwise": (lambda x, y: F.gelu(x) * y + x.sin(), lambda: (floats(5, 37), floats(37))),
    "reductions": (lambda x: (x.softmax(-1), x.var(0), x.argmax(1)), lambda: (floats(33, 70),)),
    "product": (lambda x, w, b: torch.addmm(b, x, w).relu(), lambda: (floats(17, 40), floats(40, 33), floats(33))),
    "attention": (attention, lambda: (floats(2, 3, 17, 16), floats(2, 3, 17, 16), floats(2, 3, 17, 16))),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1).relu(), lambda: (floats(2, 8, 9, 9), floats(16, 8, 3, 3))),
    "scatter": (
        lambda x, i: torch.zeros(9, 4, dtype=x.dtype).index_add(0, i, x).scatter(0, i[None, :4], 7.0),
        lambda: (floats(6, 4), torch.tensor([3, 1, 3, 8, 0, 1])),
    ),
    "loss": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), lambda: (floats(12, 7), torch.arange(12) % 7)),
    "calls by Python": (with_calls, lambda: (floats(20, 6),)),
    "library": (lambda x: torch.linalg.inv(x @ x.t() + 5 * torch.eye(6)).sort(-1), lambda: (floats(6, 6),)),
    "in place": (in_place, lambda: (floats(6, 6), floats(6, 6))),
    "aliases": (aliased, lambda: (floats(3, 4),)),
    "constants": (lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3), lambda: (floats(4, 3),)),
    "a library's operator": (experts, lambda: (floats(6, 8), floats(2, 8, 16), torch.tensor([2, 6]))),
    "no tensors": (lambda n: torch.arange(n) * 2, lambda: (5,)),
    "functions of positions": (windowed(9), lambda: (floats(1, 2, 64, 16),)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", INFERENCE)
def test_what_is_found_gives_eagers_values(name: str, found_only: Callable[[], None]) -> None:
    """Also where sizes depend on data, and Python calls what no program holds."""
    function, inputs = INFERENCE[name]
    views = []
    for outcome in ("missed", "found"):
        args = inputs()
        ours, theirs, exact = (copy.deepcopy(args), copy.deepcopy(args), widened(copy.deepcopy(args)))
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            result = compiled(function)(*ours)
        assert outcomes() == [outcome], last_starts()[-1]
        assert_matches((result, ours), (function(*theirs), theirs), (function(*exact), exact))
        views.append([each._is_view() for each in tensors(result)])
        found_only()
    assert views[0] == views[1]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(30, 16), nn.LayerNorm(16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.conv, self.batch = nn.Conv1d(16, 24, 3, padding=1), nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(self.batch(self.conv(x.transpose(1, 2))).relu().mean(-1))


def trained(model: nn.Module, call: Callable[..., Tensor], dtype: torch.dtype, steps: int = 3) -> list[Tensor]:
    """Losses, gradients and buffers of some steps."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 30, (4, 9), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(tokens), torch.arange(4) % 5)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters()), *(b for b in model.buffers() if b.is_floating_point())]  # type: ignore[misc]


@pytest.mark.sampled
def test_training(found_only: Callable[[], None]) -> None:
    torch.manual_seed(0)
    first = Small()
    reference = copy.deepcopy(first).double()
    exact = trained(reference, reference, torch.float64)
    eager = copy.deepcopy(first)
    theirs = trained(eager, eager, torch.float32)
    for outcome in ("missed", "found"):
        model = copy.deepcopy(first)
        ours = trained(model, compiled(model), torch.float32)
        assert outcomes() == [outcome]
        for a, b, c in zip(ours, theirs, exact, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)
            torch.testing.assert_close(a.double(), c, atol=2e-5, rtol=2e-4)
        found_only()


def test_attention_is_trained(found_only: Callable[[], None]) -> None:
    for _ in range(2):
        q, k, v = (floats(2, 2, 19, 16).requires_grad_() for _ in range(3))
        weight = floats(2, 2, 19, 16)
        ours = torch.autograd.grad((compiled(attention)(q, k, v) * weight).sum(), (q, k, v))
        theirs = torch.autograd.grad((attention(q, k, v) * weight).sum(), (q, k, v))
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
        found_only()
    assert outcomes() == ["missed", "found"]


def test_a_forward_pass_alone_is_not_kept() -> None:
    x = floats(4, 4).requires_grad_()
    compiled(lambda x: x.sin())(x)
    compiled(lambda x: x.sin())(x)
    assert outcomes() == ["missed", "missed"]


def test_backward_again_over_kept_results() -> None:
    for _ in range(2):
        x = floats(5, 5).requires_grad_()
        y = compiled(lambda x: x.exp().tanh().sum())(x)
        first, second = (torch.autograd.grad(y, x, retain_graph=retain)[0] for retain in (True, False))
        assert torch.equal(first, second)
    assert outcomes() == ["missed", "found"]


def test_random_numbers_are_drawn_anew() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x)

    results = []
    for _ in range(2):
        torch.manual_seed(5)
        call = compiled(function)
        results.append([call(torch.ones(50)), call(torch.ones(50))])
        assert not torch.equal(*results[-1])
    assert outcomes() == ["missed", "found"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True])
def test_frozen_parameters_are_those_of_this_process(dynamic: bool) -> None:
    """What was prepared of others is not kept, and what changes is noticed."""
    torch.manual_seed(0)
    for outcome in ("missed", "found"):
        model = Small().eval()
        call = compiled(model, freeze=True, dynamic=dynamic)
        for _ in range(2):
            for tokens in (torch.randint(0, 30, (4, 9)), torch.randint(0, 30, (4, 9))):
                exact = copy.deepcopy(model).double()
                with torch.no_grad():
                    assert_matches(call(tokens), model(tokens), exact(tokens))
            with torch.no_grad():
                model.head.weight.mul_(2)
                model.batch.running_var.add_(1)
        assert outcomes()[-1] == outcome  # with symbols Dynamo begins anew once, when it meets a float
    assert last_compilations()[-1].reused


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize("train", [False, True])
def test_dynamic_shapes(train: bool, found_only: Callable[[], None]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).softmax(-1).reshape(-1, 2).sum(0) * x.size(0)

    w = floats(8, 6)
    for sizes in ((5, 7, 9), (11, 6, 13)):
        call = compiled(function, dynamic=True)
        for size in sizes:
            x = floats(size, 8).requires_grad_(train)
            exact = x.detach().double().requires_grad_(train)
            results = [call(x, w), function(x, w), function(exact, w.double())]
            if train:
                given = (x, x, exact)
                results = [torch.autograd.grad((y * y).sum(), to)[0] for y, to in zip(results, given, strict=True)]
            assert_matches(*results)
        found_only()
    assert outcomes() == ["missed", "found"]


def test_guards_of_what_is_found_stay_guarded() -> None:
    """Broadcasting decides, while AOTAutograd traces, whether a size is 1 or equals another."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.add.Tensor(x[: y.shape[0]], y) * x.size(0)

    first = compiled(function, dynamic=True)
    for n, m in ((9, 7), (8, 6)):
        x, y = floats(n, 3), floats(m, 3)
        torch.testing.assert_close(first(x, y), function(x, y))
    outcomes()
    again = compiled(function, dynamic=True)
    for n, m in ((12, 5), (9, 9), (5, 5), (7, 1), (30, 2)):
        x, y = floats(n, 3), floats(m, 3)
        torch.testing.assert_close(again(x, y), function(x, y))
    assert outcomes()[0] == "found"


def test_sizes_that_were_specialized_miss() -> None:
    """What tracing found out of a size is asked of the sizes of now."""

    def function(x: Tensor) -> Tensor:
        return x.unflatten(0, (4, -1)).sum(0) if x.size(0) % 4 == 0 else x * 2

    for size, outcome in ((8, "missed"), (12, "found"), (16, "found"), (9, "missed")):
        x = floats(size, 3)
        torch.testing.assert_close(compiled(function, dynamic=True)(x), function(x))
        assert outcomes() == [outcome], size


@pytest.mark.sampled
@pytest.mark.parametrize(
    "function", [lambda x, f: x * f, lambda x, f: F.leaky_relu(x, f), lambda x, f: x.clamp(f, 2 * f)]
)
def test_floats_keep_their_guards(function: Callable[[Tensor, float], Tensor]) -> None:
    for _ in range(2):
        call = compiled(function, dynamic=True)
        for value in (0.5, 0.25, 0.75):
            x = floats(6, 5)
            torch.testing.assert_close(call(x, value), function(x, value))
    assert "found" in outcomes()


# -------------------------------------------------------------------------------------------------- key


def function(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2 + y).relu()


def other(x: Tensor, y: Tensor) -> Tensor:
    return (x * 3 + y).relu()


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:4], x[4:]


def start(f: Any = function, args: tuple[Any, ...] | None = None, **options: Any) -> str:
    """How a program is started."""
    compiled(f, **options)(*(args or (floats(4, 6), floats(4, 6))))
    (outcome,) = outcomes()
    return outcome


KEY = {
    "graph": lambda: start(other),
    "dtype": lambda: start(args=(floats(4, 6).double(), floats(4, 6))),
    "shape": lambda: start(args=(floats(4, 6), floats(6))),
    "strides": lambda: start(args=(floats(6, 4).t(), floats(4, 6))),
    "offset": lambda: start(args=(floats(5, 6)[1:], floats(4, 6))),
    "aliases": lambda: start(args=halves(floats(8, 6))),
    "view": lambda: start(args=(floats(5, 6)[:4], floats(4, 6))),
    "parameter": lambda: start(args=(nn.Parameter(floats(4, 6), requires_grad=False), floats(4, 6))),
    "gradients": lambda: start(args=(floats(4, 6).requires_grad_(), floats(4, 6))),
    "symbols": lambda: start(dynamic=True),
    "options": lambda: start(fusion=False),
    "verification": lambda: start(verify=True),
}


@pytest.mark.sampled
@pytest.mark.parametrize("part", KEY)
def test_another_program_is_missed(part: str) -> None:
    assert [start(), start()] == ["missed", "found"]
    assert KEY[part]() == "missed"
    told = last_starts()[-1].reason
    if part != "graph":  # which begins at another line
        assert ("options" if part in ("options", "verification") else "arguments") in told, told
    assert start() == "found"


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class _Set:
    """A context in which a setting of PyTorch has another value."""

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], None], value: Any) -> None:
        self.get, self.set, self.value = get, set, value

    def __enter__(self) -> None:
        self.before = self.get()
        self.set(self.value)

    def __exit__(self, *_: object) -> None:
        self.set(self.before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": _autocast,
    "deterministic": lambda: _Set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "dtype": lambda: _Set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "threads": lambda: _Set(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "precision": lambda: _Set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "functorch": lambda: torch._functorch.config.patch(cse=False),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


PART_OF = {
    "no gradients": "gradients",
    "inference mode": "gradients",
    "functorch": "settings",
    **{mode: mode for mode in ("autocast", "deterministic", "dtype", "threads", "precision", "attention")},
}


@pytest.mark.parametrize("mode", MODES)
def test_another_mode_is_missed(mode: str) -> None:
    args = (floats(4, 6), floats(4, 6))
    assert [start(args=args), start(args=args)] == ["missed", "found"]
    with MODES[mode]():
        assert start(args=args) == "missed"
        assert re.match(f"what was compiled before differs in .*{PART_OF[mode]}", last_starts()[-1].reason)
        assert start(args=args) == "found"
    assert start(args=args) == "found"


# What the key is made of, by what it is called there: each part with a change of nothing else.


def parts(
    f: Any = function, args: tuple[Any, ...] | None = None, dynamic: bool | None = False, **options: Any
) -> dict[str, str]:
    """What decides about a program; nothing is compiled."""
    found: list[dict[str, str]] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(parts_of(graph, inputs, Options(**options)))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(f, backend=look, dynamic=dynamic)(*(args or (floats(4, 6), floats(4, 6))))
    return found[0]


def differing(first: dict[str, str], second: dict[str, str]) -> set[str]:
    assert first.keys() == second.keys()
    return {name for name in first if first[name] != second[name]}


def marked(least: int) -> tuple[Tensor, Tensor]:
    x = floats(8, 6)
    torch._dynamo.mark_dynamic(x, 0, min=least, max=64)
    return x, floats(6)


def complexes() -> Tensor:
    return torch.randn(4, 6, dtype=torch.complex64)


def keyword(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x * y, dim=1)


def other_keyword(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x * y, dim=0)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


class Holder(nn.Module):
    def __init__(self, names: str, kind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, kind(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in sorted(vars(self)["_parameters"] or vars(self)["_buffers"]))
        return x * first + second


ARGUMENTS: dict[str, tuple[Callable[[], dict[str, str]], Callable[[], dict[str, str]]]] = {
    "dtype": (parts, lambda: parts(args=(floats(4, 6).double(), floats(4, 6)))),
    "shape": (parts, lambda: parts(args=(floats(4, 6), floats(6)))),
    "strides": (parts, lambda: parts(args=(floats(6, 4).t(), floats(4, 6)))),
    "offset": (
        lambda: parts(args=(floats(5, 6)[:4], floats(4, 6))),
        lambda: parts(args=(floats(5, 6)[1:], floats(4, 6))),
    ),
    "memory behind it": (
        lambda: parts(args=(floats(5, 6)[:4], floats(4, 6))),
        lambda: parts(args=(floats(6, 6)[:4], floats(4, 6))),
    ),
    "aliases": (lambda: parts(args=halves(floats(8, 6))), lambda: parts(args=(floats(8, 6)[:4], floats(8, 6)[4:]))),
    "parameter": (parts, lambda: parts(args=(nn.Parameter(floats(4, 6), requires_grad=False), floats(4, 6)))),
    "gradients": (parts, lambda: parts(args=(floats(4, 6).requires_grad_(), floats(4, 6)))),
    "conjugate": (
        lambda: parts(torch.mul, (complexes(), complexes())),
        lambda: parts(torch.mul, (complexes().conj(), complexes())),
    ),
    "leaf": (
        lambda: parts(args=(floats(4, 6).requires_grad_(), floats(4, 6))),
        lambda: parts(args=(floats(4, 6).requires_grad_() * 1, floats(4, 6))),
    ),
    "range of a symbol": (
        lambda: parts(args=marked(2), dynamic=None),
        lambda: parts(args=marked(4), dynamic=None),
    ),
    "buffer": (
        lambda: parts(Holder("ab", nn.Buffer), (floats(3),)),
        lambda: parts(Holder("ab", lambda x: nn.Parameter(x, requires_grad=False)), (floats(3),)),
    ),
    "where it comes from": (
        lambda: parts(Holder("ab", nn.Buffer), (floats(3),)),
        lambda: parts(Holder("ac", nn.Buffer), (floats(3),)),
    ),
    "symbols": (
        lambda: parts(args=(floats(4, 6), floats(6))),
        lambda: parts(args=(floats(4, 6), floats(6)), dynamic=True),
    ),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_another_argument_is_another_key(what: str) -> None:
    before, after = ARGUMENTS[what]
    assert before() == before()
    assert "arguments" in differing(before(), after())


GRAPHS: dict[str, tuple[Callable[[], dict[str, str]], Callable[[], dict[str, str]]]] = {
    "call": (parts, lambda: parts(other)),
    "keyword": (lambda: parts(keyword), lambda: parts(other_keyword)),
    "constant": (lambda: parts(scaled, (floats(3), 0.5)), lambda: parts(scaled, (floats(3), 0.25))),
    "inner graph": (
        lambda: parts(windowed(9), (floats(1, 2, 64, 16),)),
        lambda: parts(windowed(10), (floats(1, 2, 64, 16),)),
    ),
    "type of a constant": (lambda: parts(scaled, (floats(3), 2.0)), lambda: parts(scaled, (floats(3), 2))),
}


@pytest.mark.parametrize("what", GRAPHS)
def test_another_graph_is_another_key(what: str) -> None:
    before, after = GRAPHS[what]
    assert before() == before()
    assert differing(before(), after()) >= {"graph"}


def _patched(name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch(name, value)


# From a part of the key to what changes it.
STATES: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "no gradients": ("gradients", torch.no_grad),
    # Dynamo turns it off while it compiles, so that it is what `no_grad` is.
    "inference mode": ("gradients", torch.inference_mode),
    "autocast": ("autocast", _autocast),
    "autocast to f16": ("autocast", lambda: torch.autocast("cpu", dtype=torch.float16)),
    "autocast cache": ("autocast cache", lambda: torch.autocast("cpu", enabled=False, cache_enabled=False)),
    "deterministic": ("deterministic", MODES["deterministic"]),
    "warns only": (
        "warns only",
        lambda: _Set(
            torch.is_deterministic_algorithms_warn_only_enabled,
            lambda warns: torch.use_deterministic_algorithms(warns, warn_only=warns),
            True,
        ),
    ),
    "fills memory": (
        "fills memory",
        lambda: _Set(
            lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            lambda fills: setattr(torch.utils.deterministic, "fill_uninitialized_memory", fills),
            False,
        ),
    ),
    "dtype": ("dtype", MODES["dtype"]),
    "device": ("device", _patched("torch.get_default_device", lambda: torch.device("cpu:0"))),
    "threads": ("threads", MODES["threads"]),
    "precision": ("precision", MODES["precision"]),
    "onednn": ("onednn", lambda: torch.backends.mkldnn.flags(enabled=False)),
    "onednn deterministic": ("onednn", lambda: torch.backends.mkldnn.flags(enabled=True, deterministic=True)),
    "attention": ("attention", MODES["attention"]),
    "einsum": ("einsum", _patched("torch.backends.opt_einsum.strategy", "optimal")),
    "functorch": ("settings", MODES["functorch"]),
    "symbols": ("settings", lambda: torch.fx.experimental._config.patch(use_duck_shape=False)),
    "sizes": ("sizes", lambda: torch._dynamo.config.patch(capture_scalar_outputs=True)),
    "machine": ("machine", _patched("pellucid.reuse.machine_for", lambda _: AVX512)),
    "Pellucid": ("Pellucid", _patched("pellucid.reuse._own_sources", lambda: "other")),
    "Python": ("Python", _patched("platform.python_version", lambda: "3.99")),
    "PyTorch": ("PyTorch", _patched("torch.version.git_version", "other")),
}


@pytest.mark.parametrize("state", STATES)
def test_another_state_is_another_key(state: str) -> None:
    part, change = STATES[state]
    args = floats(4, 6), floats(4, 6)
    before = parts(args=args)
    with change():
        assert part in differing(before, parts(args=args))
    assert parts(args=args) == before


def test_each_part_of_the_key_is_tested() -> None:
    assert set(parts()) == {"graph", "arguments", "options", *(part for part, _ in STATES.values())}


def test_each_option_is_part_of_the_key() -> None:
    """But those that bypass, and that which says only who waits."""
    before = parts()
    for field in fields(Options):
        if field.name not in ("trace", "reuse", "background"):
            value: Any = not field.default if isinstance(field.default, bool) else 7
            value = "reference" if field.default == "" else value
            others = {"machine"} if field.name == "machine" else set()  # the reference may have other cores than this
            assert differing(before, parts(**{field.name: value})) - others == {"options"}, field.name


def test_a_changed_source_is_another_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_PACKAGE", tmp_path)
    texts = {
        "pipeline.py": "a",
        "native/kernel/micro.h": "a",
        "native/runtime.cpp": "a",
        "kit/show.py": "a",
        "x.txt": "a",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    seen = {OWN_SOURCES()}
    for name in texts:
        (tmp_path / name).write_text("b")
        seen.add(OWN_SOURCES())
    assert len(seen) == 4  # neither the kit nor what is no source counts
    (tmp_path / "pipeline.py").rename(tmp_path / "pipes.py")
    assert OWN_SOURCES() not in seen


OTHER = uuid.uuid4()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pellucid.reuse._own_sources", OTHER.__str__),
        ("pellucid.reuse.machine_for", lambda _: AVX512),
        ("torch.version.git_version", "other"),
        ("platform.python_version", lambda: "3.99"),
    ],
)
def test_another_version_is_missed(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [start(), start()] == ["missed", "found"]
    with monkeypatch.context() as patch:
        patch.setattr(name, value)
        assert start() == "missed"
    assert start() == "found"


def test_another_version_of_an_operators_library_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (floats(6, 8), floats(2, 8, 16), torch.tensor([2, 6]))
    for name in ("1.0", "2.0"):
        monkeypatch.setattr("transformers.__version__", name)
        compiled(experts)(*args)
        assert outcomes() == ["missed"]
        compiled(experts)(*args)
        assert outcomes() == ["found"]


def test_another_toolchain_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the toolchain is, with the CPU and PyTorch's release, names the folder in which programs lie."""
    assert start() == "missed"
    key = last_starts()[-1].key
    assert len(list(default_store().programs(key))) == 1
    detect.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setenv("PELLUCID_CXXFLAGS", "-O1")
            assert not list(default_store().programs(key))
    finally:
        detect.cache_clear()


def test_a_line_that_has_moved_is_told_where_it_is() -> None:
    """Errors name the user's line, so that a program is another one when its lines lie elsewhere."""
    lines = "def {name}(x, i):\n    return x[i]\n"
    functions = []
    for name in ("f", "f"):
        scope: dict[str, Any] = {}
        exec(compile("\n" * len(functions) + lines.format(name=name), "moved.py", "exec"), scope)
        functions.append(scope["f"])
    assert [start(each, (floats(4), torch.tensor([1]))) for each in functions] == ["missed", "missed"]


# ------------------------------------------------------------------------------------------ bad entries


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def _replace_by_link(path: Path) -> None:
    target = path.with_suffix(".moved")
    path.rename(target)
    path.symlink_to(target)


def _write_nonsense(path: Path) -> None:
    data = b"no pickle"
    header = json.dumps({"sum": hashlib.sha256(data).hexdigest(), "bytes": len(data)})
    path.write_bytes(header.encode() + b"\n" + data)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_damage, "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (_write_nonsense, "cannot be read: UnpicklingError"),
        (lambda path: path.chmod(0o666), "could have been written by another user"),
        (lambda path: os.chown(path, 12345, -1), "could have been written by another user"),
        (_replace_by_link, "cannot be read"),
    ],
)
def test_bad_entries_are_missed_with_a_reason(spoil: Callable[[Path], None], reason: str) -> None:
    if "chown" in spoil.__code__.co_names and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    args = floats(4, 6), floats(4, 6)
    assert start(args=args) == "missed"
    spoil(kept())
    result = compiled(function)(*args)
    told = last_starts()[-1]
    assert outcomes() == ["missed"] and reason in told.reason
    assert_matches(result, function(*args), function(*widened(args)))
    assert start(args=args) == "found"  # it was written again


def test_a_kernel_that_has_gone_is_built_again() -> None:
    args = floats(4, 6), floats(4, 6)
    assert start(args=args) == "missed"
    backend_module = sys.modules["pellucid.native.build"]
    backend_module.SESSION.addresses.clear()  # type: ignore[attr-defined]
    for path in (default_store().directory / "kernels").iterdir():
        path.unlink()
    assert start(args=args) == "found"


# -------------------------------------------------------------------------------------------- processes

SCRIPT = """
    import os, sys, torch
    from pellucid import backend

    def function(x, w):
        return ((x @ w) * {number}).softmax(-1)

    def run():
        torch.manual_seed(0)
        x, w = torch.randn(9, 8), torch.randn(8, 7, requires_grad=True)
        y = torch.compile(function, backend="pellucid", options={{"reuse": True}})(x, w)
        (ours,) = torch.autograd.grad(y[:, 0].sum(), w)
        (theirs,) = torch.autograd.grad(function(x, w)[:, 0].sum(), w)
        torch.testing.assert_close(ours, theirs)
        return [start.outcome for start in backend.last_starts()]
"""


def run_script(body: str, number: float) -> str:
    text = textwrap.dedent(SCRIPT).format(number=number) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.sampled
def test_a_second_process_compiles_nothing() -> None:
    number = random.random()
    assert run_script("print(run())", number) == "['missed']"
    forbid = """
        def fail(*_, **__):
            raise AssertionError
        backend.capture_with_aot = backend.compile_graph = fail
        print(run())
    """
    assert run_script(forbid, number) == "['found']"


@pytest.mark.sampled
def test_twenty_processes_at_once() -> None:
    """Some miss together and write the same, some find what was just written; all are right."""
    number = random.random()
    body = """
        children = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)
                try:
                    run()
                except BaseException as error:
                    print(repr(error), file=sys.stderr)
                    os._exit(1)
                os._exit(0)
            children.append(child)
        print([os.waitpid(child, 0)[1] for child in children])
    """
    assert run_script(body, number) == str([0] * 20)
    again = "torch.set_num_threads(1)\nprint(run())"
    assert run_script(again, number) == "['found']"


# ---------------------------------------------------------------------------------------- what is told


def test_a_miss_of_a_module_without_a_line_of_the_user_has_its_reason() -> None:
    model, x = nn.Sequential(nn.Linear(7, 5), nn.Tanh()), floats(3, 7)
    with torch.no_grad():
        compiled(model)(x)
        with _Set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True):
            compiled(model)(x)
    assert last_starts()[-1].reason == "what was compiled before differs in deterministic"


def test_each_outcome_has_its_reason_and_key() -> None:
    assert [start(), start()] == ["missed", "found"]
    missed, found = last_starts()[-2:]
    assert missed.reason == "nothing like it was compiled before" and re.fullmatch(r"[0-9a-f]{40}", missed.key)
    assert found.key == missed.key and found.reason == "an earlier process compiled it"
    first, second = last_compilations()[-2:]
    assert not first.reused and first.seconds and second.reused and not second.seconds
    assert first.name != second.name and (first.kernels, first.nodes) == (second.kernels, second.nodes)


def test_calls_have_names_of_this_process() -> None:
    """`last_compilations` and profiles call them the same."""
    for _ in range(2):
        compiled(lambda x: torch.linalg.inv(x @ x.t() + torch.eye(4)))(floats(4, 4))
    first, second = last_compilations()[-2:]
    assert [call.op for call in first.calls] == [call.op for call in second.calls] != []
    for each in (first, second):
        assert all(call.name.startswith(f"pellucid::{each.name}/") for call in each.calls)


def test_a_profile_of_what_was_found() -> None:
    """The kit reads the whole program when it looks into it."""
    x, y = floats(300, 300), floats(300, 300)
    compiled(function)(x, y)
    call = compiled(function)
    call(x, y)
    assert outcomes() == ["missed", "found"]
    with profile() as taken:
        call(x, y)
    assert "relu" in str(taken) or "max" in str(taken)


def cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


@torch.library.custom_op("pellucid_reuse::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)


@torch.library.custom_op("torchvision::pellucid_reuse_double", mutates_args=())
def of_no_version(x: Tensor) -> Tensor:
    return x * 2


of_no_version.register_fake(torch.empty_like)


BYPASSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "reuse": (torch.sin, {"reuse": False}, "the option `reuse` is off"),
    "cond": (cond, {}, "cond"),
    "custom": (lambda x: double(x), {}, "pellucid_reuse"),
    "a package that is not there": (lambda x: of_no_version(x), {}, "torchvision.pellucid_reuse_double"),
}


@pytest.mark.parametrize("name", BYPASSED)
def test_what_is_bypassed_has_a_reason(name: str) -> None:
    f, options, reason = BYPASSED[name]
    for _ in range(2):
        x = floats(5)
        torch.testing.assert_close(compiled(f, **options)(x), f(x))
        assert last_starts()[-1].outcome == "bypassed" and reason in last_starts()[-1].reason


def test_arguments_that_share_memory_and_change_are_bypassed() -> None:
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    for _ in range(2):
        ours, theirs = floats(8), torch.empty(8)
        theirs.copy_(ours)
        torch.testing.assert_close(compiled(change)(ours[:5], ours[3:]), change(theirs[:5], theirs[3:]))
        torch.testing.assert_close(ours, theirs)
    assert outcomes() == ["missed", "bypassed", "missed", "bypassed"]


def test_a_trace_shows_every_stage_and_why(tmp_path: Path) -> None:
    compiled(function)(floats(3), floats(3))
    for number, (f, otherwise) in enumerate(
        ((function, "found: an earlier process compiled it"), (other, "missed: nothing like it was compiled"))
    ):
        compiled(f, trace=str(tmp_path / str(number)))(floats(3), floats(3))
        (decisions,) = (tmp_path / str(number)).rglob("decisions.csv")
        assert f"a trace shows every stage; without one, {otherwise}" in decisions.read_text()
    assert outcomes() == ["missed", "bypassed", "bypassed"]


def test_subclasses_of_tensors_are_bypassed() -> None:
    """As arguments, and where the graph makes them."""

    def made(x: Tensor) -> Tensor:
        return TwoTensor(x.sin(), x.cos()) * 2

    for f, x in ((torch.sin, TwoTensor(floats(4), floats(4))), (made, floats(4))):
        for _ in range(2):
            torch.testing.assert_close(compiled(f)(x).a, f(x).a)
            assert "missed" not in outcomes() and "subclass" in last_starts()[-1].reason


def test_promises_are_checked_by_what_is_compiled() -> None:
    with torch._functorch.config.patch(debug_assert=True):
        assert start() == "bypassed"


def test_the_store_says_what_a_program_is() -> None:
    assert start() == "missed"
    (found,) = (each for each in contents(default_store().directory) if each.paths[0] == kept())
    assert found.about["line"].startswith(f"{__file__}:") and found.about["threads"] == torch.get_num_threads()
    assert [graph["kind"] for graph in found.about["graphs"]] == ["inference"]
    assert reuse.stale(found.about) == ""
    for name in found.about["versions"]:
        old = {**found.about, "versions": {**found.about["versions"], name: "old"}}
        assert reuse.stale(old).startswith(f"it was compiled by another version of {name}")


def test_unused_programs_go() -> None:
    assert start() == "missed"
    path = kept()
    os.utime(path, (1, 1))
    assert start(other) == "missed" and not path.exists()


def test_compiled_autograd_traces_what_was_found() -> None:
    for again in (False, False, True):
        x = floats(6, 4).requires_grad_()
        y = compiled(lambda x: (x.sin() * 2).sum())(x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")) if again else nullcontext():
            y.backward()
        torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    assert outcomes() == ["missed", "found", "found"]
