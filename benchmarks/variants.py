"""Kernels whose plans are close by price: does the option `variants` find the fastest?

    python -m benchmarks.variants [FIRST:LAST]   # each way forced, next to the one that was chosen; a fresh store first
    pellucid bench benchmarks/variants.py:heads --no-cold --backend pellucid --backend pellucid:variants=on
    pellucid bench benchmarks/variants.py:rows --no-cold --backend pellucid --backend pellucid:variants=on

In `rows` nothing is tried, as other plans would round otherwise. Record 30 has what was measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.backend import compile_fx, variants
from pellucid.native import timeline

Made = tuple[Callable[..., Any], tuple[Tensor, ...]]

_ROUNDS = 21
_LEAST_S = 0.004  # that calls of one way take together in a round
_SETTLED_S = 20.0  # after which a trial counts as one that does not end


def heads() -> Made:
    """Heads of attention laid out one after the other."""
    return lambda x: x.transpose(1, 2).contiguous() * 0.125, (torch.randn(8, 512, 12, 64),)


def rows() -> Made:
    """Softmax of rows."""
    return lambda x: x.softmax(1), (torch.randn(1000, 1500),)


def _permuted(*order: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.permute(order).contiguous().exp()


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight)


def _product(m: int, n: int, k: int) -> Made:
    return _linear, (torch.randn(m, k), torch.randn(n, k))


def _convolution(channels: int, size: int, kernel: int, stride: int) -> Made:
    image = torch.randn(1, channels, size, size).to(memory_format=torch.channels_last)
    weight = torch.randn(2 * channels, channels, kernel, kernel)
    return partial(nn.functional.conv2d, stride=stride, padding=kernel // 2), (image, weight)


def _norm(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True) + 1e-5)


def generated() -> list[tuple[str, Made]]:
    """Thirty kernels, with what they are called."""
    r = torch.randn
    return [
        ("permute(1, 0, 2) of 64 x 96 x 128", (_permuted(1, 0, 2), (r(64, 96, 128),))),
        ("permute(1, 0, 2) of 128 x 128 x 128", (_permuted(1, 0, 2), (r(128, 128, 128),))),
        ("permute(2, 1, 0) of 64 x 96 x 128", (_permuted(2, 1, 0), (r(64, 96, 128),))),
        ("permute(2, 1, 0) of 128 x 128 x 128", (_permuted(2, 1, 0), (r(128, 128, 128),))),
        ("permute(2, 0, 1) of 100 x 120 x 140", (_permuted(2, 0, 1), (r(100, 120, 140),))),
        ("permute(0, 2, 1) of 32 x 200 x 300", (_permuted(0, 2, 1), (r(32, 200, 300),))),
        ("permute(0, 2, 1, 3) of 8 x 512 x 12 x 64", heads()),
        ("permute(0, 2, 1, 3) of 8 x 12 x 512 x 64", (heads()[0], (r(8, 12, 512, 64),))),
        ("permute(3, 1, 0, 2) of 16 x 24 x 32 x 40", (_permuted(3, 1, 0, 2), (r(16, 24, 32, 40),))),
        ("x.t() + y, 1000 x 1500", (lambda x, y: x.t() + y, (r(1500, 1000), r(1000, 1500)))),
        ("x.t() + y, 512 x 768", (lambda x, y: x.t() + y, (r(768, 512), r(512, 768)))),
        ("x.t() * y + z, 700 x 900", (lambda x, y, z: x.t() * y + z, (r(900, 700), r(700, 900), r(700, 900)))),
        ("x and x.t(), 1000 x 1500", (lambda x: (x + 1, (x + 1).t().contiguous()), (r(1000, 1500),))),
        ("x.sum(0), 1000 x 1500", (lambda x: x.sum(0), (r(1000, 1500),))),
        ("x.sum(1), 64 x 128 x 256", (lambda x: x.sum(1), (r(64, 128, 256),))),
        ("x.amax(1), 48 x 200 x 300", (lambda x: x.amax(1), (r(48, 200, 300),))),
        ("x.softmax(0), 1000 x 1500", (lambda x: x.softmax(0), (r(1000, 1500),))),
        ("x.softmax(0), 512 x 768", (lambda x: x.softmax(0), (r(512, 768),))),
        ("x.softmax(1), 16 x 64 x 784", (lambda x: x.softmax(1), (r(16, 64, 784),))),
        ("norm of channels, 16 x 64 x 784", (_norm, (r(16, 64, 784),))),
        ("outer product, 2048 x 2048", (lambda x, y: x[:, None] * y, (r(2048), r(2048)))),
        ("x * y[:, None] + z, 1500 x 1000", (lambda x, y, z: x * y[:, None] + z, (r(1500, 1000), r(1500), r(1000)))),
        ("gelu(x + b), 512 x 3072", (lambda x, b: nn.functional.gelu(x + b), (r(512, 3072), r(3072)))),
        ("linear 64 x 512 x 2048", _product(64, 512, 2048)),
        ("linear 196 x 384 x 384", _product(196, 384, 384)),
        ("linear 128 x 128 x 512", _product(128, 128, 512)),
        ("linear 1500 x 384 x 384", _product(1500, 384, 384)),
        ("linear 512 x 512 x 512", _product(512, 512, 512)),
        ("convolution 64 x 56 x 56, 1 x 1", _convolution(64, 56, 1, 1)),
        ("convolution 64 x 56 x 56, 3 x 3, stride 2", _convolution(64, 56, 3, 2)),
    ]


def main() -> None:
    """Measure some of the kernels, and print a row for each."""
    first, _, last = (sys.argv[1] if len(sys.argv) > 1 else "0:30").partition(":")
    torch._dynamo.config.recompile_limit = 64
    with torch.no_grad():
        for name, (function, args) in generated()[int(first) : int(last)]:
            torch._dynamo.reset()
            print(name, _measured(function, args), sep=": ", flush=True)


def _measured(function: Callable[..., Any], args: tuple[Tensor, ...]) -> str:
    trying = _compiled(function, "on")
    expected = trying(*args)
    end = time.monotonic() + _SETTLED_S
    while not variants()[-1].ok and time.monotonic() < end:
        _same(trying(*args), expected)
    if not variants()[-1].ok:
        return "the trial did not end"
    facts = dict(variants()[-1].facts)
    ways = str(facts["kernels"]).split()
    forced = [_compiled(function, way) for way in ways]
    for each in forced:
        _same(each(*args), expected)
    times = _times([trying, *forced], args)
    medians = [median(each) for each in times]
    chosen = ways.index(str(facts["fastest"]))
    best = medians.index(min(medians[1:]), 1)
    slowest = medians[0] / max(medians[1:])
    return (
        f"number {chosen} of {len(ways)} after {facts['pairs']} pairs; next to the cheapest by price "
        f"{_ratio(times[1 + chosen], times[1])}, to the fastest {_ratio(times[1 + chosen], times[best])}; "
        f"with the option to the slowest {slowest:.3f}; us: " + " ".join(f"{each * 1e6:.0f}" for each in medians[1:])
    )


def _compiled(function: Callable[..., Any], which: str) -> Callable[..., Any]:
    backend = partial(compile_fx, options={"variants": which, "reuse": False})
    return torch.compile(function, backend=backend, dynamic=False)


def _times(functions: list[Callable[..., Any]], args: tuple[Tensor, ...]) -> list[list[float]]:
    """Seconds of a run, without what Python does around it, by function and round; the functions take turns."""
    began = time.perf_counter()
    functions[0](*args)
    calls = 1 + int(_LEAST_S / (time.perf_counter() - began))
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(_ROUNDS):
        for number in range(len(functions))[:: 1 if turn % 2 else -1]:
            timeline.start()
            for _ in range(calls):
                functions[number](*args)
            times[number].append(median((run.span.end - run.span.begin) / 1e9 for run in timeline.stop()))
    return times


def _ratio(one: list[float], other: list[float]) -> str:
    """Of the times in the same rounds: the median, and the middle half."""
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    return f"{median(ratios):.3f} ({ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f})"


def _same(found: Any, expected: Any) -> None:
    """Every way gives the same bits."""
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    if not all(torch.equal(one, other) for one, other in pairs):
        raise AssertionError("a way gives other bits")


if __name__ == "__main__":
    main()
