"""What the programs of a run folder call: their values, comparing and timing, building and calling kernels."""

from __future__ import annotations

import ctypes
import hashlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from pellucid.capture.sizes import fake_inputs
from pellucid.capture.torch_compat import traced_anew
from pellucid.debug.case import copied
from pellucid.debug.graphs import Graph
from pellucid.debug.judge import Output, worst
from pellucid.debug.judge_graph import judge_graph
from pellucid.debug.pellucid_subject import Pellucid
from pellucid.native.build import build
from pellucid.options import make_options
from pellucid.pipeline import compile_graph
from pellucid.trace.schema import VALUES

Kernel = Callable[..., None]

# How long one program is timed, and how often it is called at least.
_SECONDS = 0.1
_CALLS = 3
_COMMENT = re.compile(r"\s*//.*")


# ------------------------------------------------------------------------------------------------ values


def saved(program: str) -> Mapping[str, Any]:
    """`constants`, a list of tensors, and `inputs`, the arguments of the first call: None when there was none.

    program: the path of a program of the run folder. Raises FileNotFoundError when it has left the folder.
    """
    path = Path(program).with_name(VALUES)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {VALUES} beside {program}: a program runs in its own run folder")
    return cast(Mapping[str, Any], torch.load(path, weights_only=True))


def drawn(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this layout for a graph that was never called: 0 and 1 where integers are asked for, as these are
    valid indices; else random numbers between 0 and 1, matrices scaled down such that their products do not grow.
    """
    tensor = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return tensor.copy_(torch.randint(0, 2, tuple(shape)).to(dtype))
    scale = max(shape, default=1) if len(shape) > 1 else 1
    return tensor.copy_(((1 - torch.rand(tuple(shape))) / max(scale, 1)).to(dtype))


# ------------------------------------------------------------------------------------------------ a graph


def compare_compiled(
    module: torch.nn.Module, inputs: list[Any], kind: str = "inference", sizes: Mapping[str, Any] | None = None
) -> int:
    """Compile a graph, judge what it does beside eager, float64 deciding, and print that; returns the exit code.

    kind: `inference`, `forward` or `backward`. sizes: which of the inputs' are symbols, see `capture.sizes`.
    """
    graph = _graph(module, inputs, kind, sizes)
    outputs = judge_graph(graph, Pellucid())
    for output in outputs:
        if not output.verdict.good:
            print(f"{_name_of(output)}: {output.dtype} {output.shape}, {output.verdict}: {output.judgement.why}")
    executable, _ = compile_graph(graph.module, kind, make_options())
    given = copied(inputs)
    eager = _time(lambda: graph.module(*given))
    compiled = _time(lambda: executable(list(given)))
    print(f"{compiled} per call, eager {eager}")
    print(f"verdict: {_verdict(outputs)}")
    return int(not all(output.verdict.good for output in outputs))


def _verdict(outputs: Sequence[Output]) -> str:
    bad = [output for output in outputs if not output.verdict.good]
    if bad:
        return f"{worst([output.verdict for output in bad])}: {len(bad)} of {len(outputs)} results"
    moved = [output for output in outputs if output.judgement.error]
    if not moved:
        return f"ok: {len(outputs)} results, all equal to eager's"
    most = max(moved, key=lambda output: output.judgement.error / output.judgement.allowed)
    error = f"{most.judgement.error:.2g}, allowed {most.judgement.allowed:.2g}"
    return f"rounding: {len(moved)} of {len(outputs)} results, most {_name_of(most)} (error {error})"


def _name_of(output: Output) -> str:
    return output.name.partition(": ")[2]


def _graph(module: torch.nn.Module, inputs: list[Any], kind: str, sizes: Mapping[str, Any] | None) -> Graph:
    static = {"symbols": {}, "inputs": [None] * len(inputs)}
    mode, fakes = fake_inputs(_bound(sizes or static, inputs), inputs)
    return Graph("graph", kind, traced_anew(module, fakes, mode), tuple(inputs))


def _bound(sizes: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """The sizes with the values that their symbols have in these inputs."""
    symbols = dict(sizes["symbols"])
    for form, value in zip(sizes["inputs"], inputs, strict=True):
        formulas = [form] if isinstance(value, int) else form["size"] if isinstance(form, dict) else []
        numbers = [value] if isinstance(value, int) else value.shape if isinstance(value, torch.Tensor) else []
        symbols.update({name: number for name, number in zip(formulas, numbers, strict=False) if name in symbols})
    return {**sizes, "symbols": symbols}


# ------------------------------------------------------------------------------------------------ kernels


def compare_edited(call: Callable[..., list[Any]], sources: Mapping[str, str], inputs: list[Any], program: str) -> int:
    """Run the kernels in `sources` beside those in the folder `kernels`, which nobody edited, and print what differs.

    Returns the exit code: 1 when an edit changed a result. Only comments may differ in a kernel that is not edited.
    """
    written = {name: (Path(program).with_name("kernels") / f"{name}.cpp").read_text() for name in sources}
    edited = [name for name, text in sources.items() if _plain(text) != _plain(written[name])]
    unedited = load_kernels({name: written[name] if name in edited else text for name, text in sources.items()})
    before = _outcome(call, unedited, inputs)
    if not edited:
        for name, tensor in before.items():
            print(f"{name}: {_described(tensor)}, {_magnitude(tensor)}")
        print(f"{_time_of(call, unedited, inputs)} per call, by Python and on one thread")
        print("verdict: no kernel is edited")
        return 0
    kernels = load_kernels(sources)
    after = _outcome(call, kernels, inputs)
    changed = [name for name in sorted({*before, *after}) if _told(name, before.get(name), after.get(name))]
    seconds = [_time_of(call, each, inputs) for each in (kernels, unedited)]
    print(f"{seconds[0]} per call, unedited {seconds[1]}, by Python and on one thread")
    differs = f"differs in {', '.join(changed)}" if changed else "the results are the same, bit for bit"
    print(f"verdict: edited {', '.join(edited)}: {differs}")
    return int(bool(changed))


def _plain(source: str) -> list[str]:
    """The lines of a source without comments."""
    lines = (_COMMENT.sub("", line).rstrip() for line in source.splitlines())
    return [line for line in lines if line]


def _outcome(
    call: Callable[..., list[Any]], kernels: Mapping[str, Kernel], inputs: list[Any]
) -> dict[str, torch.Tensor]:
    """The tensors that a call returns, and those inputs that it changes."""
    given = copied(inputs)
    torch.manual_seed(0)
    results = call(given, kernels)
    found = {f"output {n}": value for n, value in enumerate(results) if isinstance(value, torch.Tensor)}
    for number, (value, old) in enumerate(zip(given, inputs, strict=True)):
        if isinstance(value, torch.Tensor) and not _same(value, old).all():
            found[f"input {number} (changed)"] = value
    return copied(found)


def _told(name: str, before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    """Print one result of both programs; whether they differ."""
    if before is None or after is None:
        print(f"{name}: only with {'the edited' if before is None else 'the unedited'} kernels")
        return True
    same = _same(after, before)
    shown = f"{name}: {_described(after)}, {_magnitude(after)}"
    if same.all():
        print(f"{shown}, the same as unedited")
        return False
    wide = torch.complex128 if after.is_complex() else torch.float64
    away = (after.to(wide) - before.to(wide)).abs()
    finite = away[away.isfinite()]
    most = f"by at most {finite.max().item():.3g}" if finite.numel() else "in what is not finite"
    print(f"{shown}; unedited {_magnitude(before)}: {int((~same).sum())} of {same.numel()} elements differ, {most}")
    return True


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal; NaN equals NaN."""
    return (a == b) | ((a != a) & (b != b))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _magnitude(tensor: torch.Tensor) -> str:
    wide = (tensor.abs() if tensor.is_complex() else tensor).double()
    finite = wide[wide.isfinite()]
    rms = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    others = wide.numel() - finite.numel()
    return f"rms {rms:.6g}" + (f", {others} not finite" if others else "")


def load_kernels(sources: Mapping[str, str]) -> dict[str, Kernel]:
    """Build C++ kernels, edited or not; each is called as `kernel([tensors], [symbols], extent)`.

    The function in the text has the name of its key; it is renamed after its content, so that an edit is compiled
    and never mistaken for the original.
    """
    renamed = {name: f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}" for name, text in sources.items()}
    addresses, _ = build({renamed[name]: text.replace(name, renamed[name]) for name, text in sources.items()})
    return {name: _callable(name, addresses[unique]) for name, unique in renamed.items()}


def _callable(name: str, address: int) -> Kernel:
    function = ctypes.CFUNCTYPE(
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    )(address)  # fmt: skip

    def call(tensors: Sequence[torch.Tensor], symbols: Sequence[int], extent: int) -> None:
        pointers = (ctypes.c_void_p * max(1, len(tensors)))(*[tensor.data_ptr() for tensor in tensors])
        sizes = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)
        status = function(ctypes.addressof(pointers), ctypes.addressof(sizes), 0, extent)
        if status:
            raise IndexError(f"{name}: index check {status - 1} failed")

    return call


def buffer(arena: torch.Tensor, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """`numel` elements of `dtype` at byte `offset` of the arena."""
    return arena[offset : offset + numel * dtype.itemsize].view(dtype)


def view(base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A strided view; `offset` counts elements from the start of `base`."""
    return torch.as_strided(base, tuple(shape), tuple(strides), base.storage_offset() + offset)


def fit(result: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """What an ATen call returned, in the layout that the graph was compiled for."""
    if result.stride() == tuple(strides):
        return result
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=result.dtype).copy_(result)


# ------------------------------------------------------------------------------------------------ time


def _time_of(call: Callable[..., Any], kernels: Mapping[str, Kernel], inputs: list[Any]) -> str:
    given = copied(inputs)
    return _time(lambda: call(given, kernels))


def _time(call: Callable[[], object]) -> str:
    """The median time of a call, for people. Called once without a clock before."""
    call()
    seconds: list[float] = []
    while len(seconds) < _CALLS or sum(seconds) < _SECONDS:
        start = time.perf_counter()
        with torch.no_grad():
            call()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return f"{median * 1e6:.1f} us" if median < 1e-3 else f"{median * 1e3:.2f} ms"
