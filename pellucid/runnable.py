"""Functions for generated programs: those of a run folder, and tests of kernels. They use the kit like scripts do.

Loading of values, comparison and timing, building and calling of kernels.
"""

from __future__ import annotations

import hashlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pellucid.kit.judge.graph import expected_of, judge_run
from pellucid.kit.judge.judge import Output, worst
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, graph_of
from pellucid.kit.runs.run import open_run
from pellucid.kit.subjects.base import Watched
from pellucid.kit.subjects.registry import subject_of
from pellucid.native.build import KernelCompileError, build
from pellucid.native.function import KernelFunction, kernel_function
from pellucid.printing import code, sentence, show
from pellucid.trace.folder import read_json
from pellucid.trace.schema import VALUES
from pellucid.trace.tensors import TensorStore

__all__ = [
    "Watched",
    "buffer",
    "compare_called",
    "compare_compiled",
    "compare_edited",
    "drawn",
    "fit",
    "graph_of",
    "load_kernels",
    "saved",
    "subject_of",
    "view",
]


# Seconds for which one program is timed, and the minimum number of calls.
_SECONDS = 0.1
_MIN_CALLS = 3
_COMMENT = re.compile(r"\s*//.*")
_OUT = Console(highlight=False)


# ------------------------------------------------------------------------------------------------ values


def saved(program: str) -> Mapping[str, Any]:
    """`constants`, a list of tensors, and `inputs`, the arguments of the first call; None if there was none.

    program: the path of a program of the run folder. Raises FileNotFoundError if it is not in that folder any more.
    """
    path = Path(program).resolve().with_name(VALUES)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {VALUES} next to {program}: a program runs in its own run folder")
    values, tensors = read_json(path), TensorStore(path.parents[2])
    return {what: tensors.load(values[what]) if values.get(what) else None for what in ("constants", "inputs")}


def drawn(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A random tensor of this layout, for a graph that was never called: integers are 0 or 1, which are valid indices;
    others are between 0 and 1, matrices scaled down such that their products do not grow.
    """
    tensor = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return tensor.copy_(torch.randint(0, 2, tuple(shape)).to(dtype))
    scale = max(shape, default=1) if len(shape) > 1 else 1
    return tensor.copy_(((1 - torch.rand(tuple(shape))) / max(scale, 1)).to(dtype))


# ------------------------------------------------------------------------------------------------ a graph


def compare_compiled(
    module: torch.nn.Module,
    inputs: list[Any],
    kind: str = "inference",
    sizes: Mapping[str, Any] | None = None,
    backend: str = "pellucid",
    options: Mapping[str, Any] | None = None,
) -> int:
    """Compile a graph, judge its results against eager mode and float64, and print the verdict; returns the exit code.

    kind: `inference`, `forward` or `backward`. sizes: the sizes of inputs that are symbols, see `capture.sizes`.
    """
    subject = subject_of(backend, options or {})
    graph = graph_of(module, inputs, kind, sizes)
    return _compare(graph, subject.callable(graph))


def compare_called(call: Callable[[list[Any]], Sequence[Any]], program: str) -> int:
    """Like `compare_compiled`, for a compiled graph that is a program of a run folder."""
    folder = Path(program).resolve().parent
    return _compare(open_run(folder.parents[1]).graph(folder.name), call)


@torch.no_grad()
def _compare(graph: Graph, compiled: Callable[[list[Any]], Sequence[Any]]) -> int:
    outputs = judge_run(graph, lambda inputs: compiled(list(inputs)), expected_of(graph))
    for output in outputs:
        if not output.verdict.good:
            _print(f"{_name_of(output)}: {output.dtype} {output.shape}, {output.verdict}: {output.judgement.why}")
    inputs = copied(graph.inputs)
    eager = _time(lambda: graph.module(*inputs))
    _print(f"{_time(lambda: compiled(list(inputs)))} per call, eager {eager}")
    _print(f"verdict: {_verdict(outputs)}")
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


# ------------------------------------------------------------------------------------------------ kernels


def compare_edited(call: Callable[..., list[Any]], sources: Mapping[str, str], inputs: list[Any], program: str) -> int:
    """Run the kernels in `sources` and the unedited ones in the folder `kernels`, and print how their results differ.

    Returns the exit code: 1 if an edit changed a result, or does not compile. A kernel in which only comments differ
    counts as unedited.
    """
    folder = Path(program).resolve().parents[2] / "kernels"
    written = {name: (folder / f"{name}.cpp").read_text() for name in sources}
    edited = [name for name, text in sources.items() if _plain(text) != _plain(written[name])]
    try:
        kernels = load_kernels(sources)
    except KernelCompileError as error:
        _print_refused(error, sources, program)
        return 1
    unedited = load_kernels({name: written[name] if name in edited else text for name, text in sources.items()})
    before = _outcome(call, unedited, inputs)
    if not edited:
        for name, tensor in before.items():
            _print(f"{name}: {_described(tensor)}, {_magnitude(tensor)}")
        _print(f"{_time_of(call, unedited, inputs)} per call, by Python and on one thread")
        _print("verdict: no kernel is edited")
        return 0
    after = _outcome(call, kernels, inputs)
    changed = [name for name in sorted({*before, *after}) if _differs(name, before.get(name), after.get(name))]
    seconds = [_time_of(call, each, inputs) for each in (kernels, unedited)]
    _print(f"{seconds[0]} per call, unedited {seconds[1]}, by Python and on one thread")
    differs = f"differs in {', '.join(changed)}" if changed else "the results are the same, bit for bit"
    _print(f"verdict: edited {', '.join(edited)}: {differs}")
    return int(bool(changed))


def _print_refused(error: KernelCompileError, sources: Mapping[str, str], program: str) -> None:
    """Print the compiler's error in the format of compilers, at the line of the program that contains the kernel."""
    name = next(name for name in sources if error.kernel.startswith(name))
    before, here, _ = Path(program).read_text().partition(sources[name])
    lines = sources[name].splitlines()
    known = here and 0 < error.line <= len(lines)
    at = f"{program}:{before.count(chr(10)) + error.line}" if known else name
    _print(f"{at}: error: {error.detail}")
    if known:
        show(_OUT, code(lines[error.line - 1].strip(), "    "))
    _print(f"verdict: edited {name}: does not compile")


def _plain(source: str) -> list[str]:
    """The lines of a source without comments."""
    lines = (_COMMENT.sub("", line).rstrip() for line in source.splitlines())
    return [line for line in lines if line]


def _outcome(
    call: Callable[..., list[Any]], kernels: Mapping[str, KernelFunction], inputs: list[Any]
) -> dict[str, torch.Tensor]:
    """The tensors that a call returns, and the inputs that it changes."""
    given = copied(inputs)
    torch.manual_seed(0)
    results = call(given, kernels)
    found = {f"output {n}": value for n, value in enumerate(results) if isinstance(value, torch.Tensor)}
    for number, (value, old) in enumerate(zip(given, inputs, strict=True)):
        if isinstance(value, torch.Tensor) and not _same(value, old).all():
            found[f"input {number} (changed)"] = value
    return copied(found)


def _differs(name: str, before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    """Print the comparison of one result of both programs; returns whether they differ."""
    if before is None or after is None:
        _print(f"{name}: only with {'the edited' if before is None else 'the unedited'} kernels")
        return True
    same = _same(after, before)
    shown = f"{name}: {_described(after)}, {_magnitude(after)}"
    if same.all():
        _print(f"{shown}, the same as unedited")
        return False
    wide = torch.complex128 if after.is_complex() else torch.float64
    difference = (after.to(wide) - before.to(wide)).abs()
    finite = difference[difference.isfinite()]
    most = f"by at most {finite.max().item():.3g}" if finite.numel() else "where they are not finite"
    _print(f"{shown}; unedited {_magnitude(before)}: {int((~same).sum())} of {same.numel()} elements differ, {most}")
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


def load_kernels(sources: Mapping[str, str]) -> dict[str, KernelFunction]:
    """Build C++ kernels, edited or not; each is called as `kernel([tensors], [symbols], extent)`.

    The function in the text has the name of its key; it is renamed by a hash of its text, so that an edited kernel is
    compiled and never confused with the original.
    """
    renamed = {name: f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}" for name, text in sources.items()}
    addresses, _ = build({renamed[name]: text.replace(name, renamed[name]) for name, text in sources.items()})
    return {name: kernel_function(name, addresses[unique]) for name, unique in renamed.items()}


def buffer(arena: torch.Tensor, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """`numel` elements of `dtype` at byte `offset` of the arena."""
    return arena[offset : offset + numel * dtype.itemsize].view(dtype)


def view(base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A strided view; `offset` counts elements from the start of `base`."""
    return torch.as_strided(base, tuple(shape), tuple(strides), base.storage_offset() + offset)


def fit(result: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The result of an ATen call, in the layout that the graph was compiled for."""
    if result.stride() == tuple(strides):
        return result
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=result.dtype).copy_(result)


# ------------------------------------------------------------------------------------------------ time, and printing


def _print(text: str) -> None:
    show(_OUT, sentence(text, hang=4))


def _time_of(call: Callable[..., Any], kernels: Mapping[str, KernelFunction], inputs: list[Any]) -> str:
    given = copied(inputs)
    return _time(lambda: call(given, kernels))


def _time(call: Callable[[], object]) -> str:
    """The median time of a call, as text; after one call that is not timed."""
    call()
    seconds: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(seconds) < _MIN_CALLS or time.perf_counter() < until:
        start = time.perf_counter()
        with torch.no_grad():
            call()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return f"{median * 1e6:.1f} us" if median < 1e-3 else f"{median * 1e3:.2f} ms"
