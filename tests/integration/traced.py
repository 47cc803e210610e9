"""Compiled functions next to eager's, and the decisions of the compiler about them."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import assert_matches, widened


def traced(
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    contract: bool = True,
    freeze: bool = False,
    **options: Any,
) -> tuple[Any, list[dict[str, str]]]:
    """The result of the compiled function, and the compiler's decisions."""
    torch._dynamo.reset()
    chosen = {"trace": str(folder), "verify": True, "contract": contract, "freeze": freeze}
    compiled = torch.compile(function, backend="pellucid", options=chosen, **options)
    with torch.no_grad():
        result = compiled(*args)
    return result, decisions(folder)


def decisions(folder: Path) -> list[dict[str, str]]:
    return [row for file in sorted(folder.rglob("decisions.csv")) for row in csv.DictReader(file.open())]


def names_of_kernels(folder: Path) -> list[str]:
    """Of the one program of a run, calls of ATen included."""
    (table,) = folder.rglob("kernels.csv")
    return [row["kernel"] for row in csv.DictReader(table.open())]


def said(rows: list[dict[str, str]], rule: str) -> list[str]:
    return [row["why"] for row in rows if row["rule"] == rule]


def runs_channels_last(model: nn.Module, folder: Path, x: torch.Tensor, **options: Any) -> list[dict[str, str]]:
    """Compare a model with eager's, whose convolutions must lie channels-last; returns the compiler's decisions."""
    result, rows = traced(model, folder, x, **options)
    with torch.no_grad():
        eager = model(x)
        assert result.stride() == eager.stride()
        assert_matches([result], [eager], [copy.deepcopy(model).double()(x.double())])
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == ["1"]
    return rows


def check(function: Callable[..., Any], result: Any, *args: Any) -> None:
    with torch.no_grad():
        assert_matches(result, function(*args), function(*widened(args)))


def with_gradients(run: Callable[..., Any], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A result, and the gradients of all arguments."""
    given = [each.detach().requires_grad_() for each in args]
    out = run(*given)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return (out.detach(), *torch.autograd.grad((out * weights).sum(), given))


def gradients(model: nn.Module, call: Callable[..., Any], *args: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a training step leaves in each parameter and buffer, and in each argument that wants a gradient."""
    model.zero_grad(set_to_none=True)
    for arg in args:
        arg.grad = None
    torch.manual_seed(7)
    call(*args).square().sum().backward()
    named = {f"grad of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    named |= {f"grad of argument {i}": arg.grad for i, arg in enumerate(args) if arg.grad is not None}
    return named | {name: buffer.clone() for name, buffer in model.named_buffers()}


def trains_like_eager(model: nn.Module, folder: Path, *args: torch.Tensor, **options: Any) -> list[dict[str, str]]:
    """Compare a training step with eager's, values and strides; returns the decisions about the layout."""
    torch._dynamo.reset()
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    settings = {"trace": str(folder), "verify": True}
    compiled = torch.compile(model, backend="pellucid", options=settings, **options)
    copies = [tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args) for _ in range(2)]
    ours, theirs = gradients(model, compiled, *copies[0]), gradients(eager, eager, *copies[1])
    exact = gradients(wide, wide, *(widened(arg.detach()).requires_grad_(arg.requires_grad) for arg in args))
    for name in theirs:
        assert_matches(ours[name], theirs[name], exact[name])
    return [row for row in decisions(folder) if row["rule"] == "transform.channels-last"]
