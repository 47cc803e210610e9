"""The programs that a benchmark runs, named by a word: a model of the registry, a user's program, a run, graph or
kernel, or a single operator.

>>> [(case.name, case.args[0].shape) for case in programs_of("aten.relu(f32[2x3])")]
[('aten.relu(f32[2x3])', torch.Size([2, 3]))]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.errors import UserError, near
from pellucid.kit.bench.models import MODELS, SEED, Size, UnknownName, build, disable_dropout
from pellucid.kit.programs.case import Case, load_case, no_run
from pellucid.kit.programs.graphs import Graph
from pellucid.kit.runs.kernel import OTHER_KERNELS, parts_with
from pellucid.kit.runs.run import Run, open_run, split_run
from pellucid.kit.subjects.registry import subject_of

_USAGE = (
    "give a model of `pellucid bench --list`, FILE.py:NAME, RUN, RUN:GRAPH, RUN:GRAPH:KERNEL, or an operator with its "
    "arguments like 'aten.bmm(f32[12x128x64], f32[12x64x128])'"
)
_OPERATOR = re.compile(r"(\w+)\.(\w+)(?:\.(\w+))?\((.*)\)", re.DOTALL)
_TENSOR = re.compile(r"(\w+)\[((?:\d+(?:x\d+)*)?)\](?:<(\d+))?")
_TYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}


def programs_of(word: str, size: Size | None = None) -> list[Case]:
    """The programs that a word names; the name of each is itself such a word. size: of a model of the registry.

    Raises `UnknownName` and UserError for a word that names none, and what building a program raises.
    """
    if word in MODELS:
        return [build(word, size)]
    operator = _OPERATOR.fullmatch(word)
    if operator is not None:
        return [_operator(word, operator)]
    found = split_run(word)
    if found is not None:
        return _graphs(open_run(found[0]), found[1])
    target, _, kernel = word.rpartition(":")
    found = split_run(target)
    if found is not None and found[1]:
        return [_kernel(word, open_run(found[0]), found[1], kernel)]
    if word.count(":") > 1 and ".py:" not in word:
        raise no_run(Path(word.partition(":")[0]))
    if ":" in word or "/" in word or Path(word).is_dir():
        case = load_case(word)
        if size is not None and size.train and isinstance(case.fn, torch.nn.Module):
            disable_dropout(case.fn.train())
        return [case]
    name, bracket, _ = word.partition("(")
    if bracket:
        hint = f"did you mean aten.{name}?" if hasattr(torch.ops.aten, name) else "give LIBRARY.NAME, like aten.bmm"
        raise UserError(f"unknown operator {name}", hint=hint)
    raise UnknownName("model", word, sorted(MODELS))


def is_sized(name: str) -> bool:
    """Whether a program has a batch size and a sequence length: some models of the registry."""
    return name in MODELS and MODELS[name].sized


def is_trainable(case: Case) -> bool:
    """Whether a program has parameters."""
    return isinstance(case.fn, torch.nn.Module) and any(True for _ in case.fn.parameters())


def operator_word(op: str, shapes: str, dtype: str, more: Sequence[tuple[str, Any]] = ()) -> str:
    """The word for an operator on tensors of shapes like `12x128x64,12x64x128`; each may also be `TYPE[SHAPE]`.

    more: its other arguments, by name.
    """
    tensors = [each if "[" in each else f"{dtype}[{each}]" for each in pieces(shapes)]
    return f"{op}({', '.join([*tensors, *(f'{name}={value!r}' for name, value in more)])})"


def pieces(text: str) -> list[str]:
    """Split a list at its commas outside of brackets."""
    found = re.split(r",(?![^\[(]*[\])])", text)
    return [each.strip() for each in found if each.strip()]


def literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# ------------------------------------------------------------------------------------------------ one operator


def _operator(word: str, found: re.Match[str]) -> Case:
    """A PyTorch operator on random tensors. Integers are below the bound after `<`, by default 2."""
    namespace, name, overload, arguments = found.groups()
    try:
        op = getattr(getattr(torch.ops, namespace), name)
        op = getattr(op, overload) if overload else op
    except AttributeError:
        known = (f"{namespace}.{each}" for each in dir(torch.ops.aten)) if namespace == "aten" else ()
        wanted = word.partition("(")[0]
        raise UserError(f"PyTorch has no operator {wanted}", hint=near(wanted, known) or _USAGE) from None
    generator = torch.Generator().manual_seed(SEED)
    args, kwargs = [], {}
    for each in pieces(arguments):
        keyword = re.match(r"(\w+)=", each)
        text = each[keyword.end() :] if keyword else each
        tensor = _TENSOR.fullmatch(text)
        value = _random(word, tensor, generator) if tensor else literal(text)
        if not tensor and re.match(r"\w+\[", text):
            raise UserError(f"{text} is not a tensor", hint="give its dtype and shape, like f32[12x128x64]")
        if keyword:
            kwargs[keyword[1]] = value
        else:
            args.append(value)

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return Case(word, call, tuple(args), kwargs)


def _random(word: str, found: re.Match[str], generator: torch.Generator) -> Tensor:
    kind, shape, bound = found.groups()
    if kind not in _TYPES:
        raise UserError(f"{word}: unknown dtype {kind}", hint=f"choose from {', '.join(_TYPES)}")
    dtype, sizes = _TYPES[kind], [int(size) for size in shape.split("x")] if shape else []
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=generator).to(dtype)
    return torch.randint(int(bound or 2), sizes, generator=generator).to(dtype)


# ------------------------------------------------------------------------------------------------ parts of a run


def _graphs(run: Run, name: str) -> list[Case]:
    return [_case_of(f"{run.folder}:{graph.name}", graph) for graph in run.graphs(name)]


def _kernel(word: str, run: Run, graph_name: str, name: str) -> Case:
    """The operators that a kernel of the run implements, on their inputs in the run."""
    subject = subject_of(run.backend, run.options_but(()))
    (graph,) = run.graphs(graph_name)
    compiled = subject.compile(graph)
    steps = {key: step for step in compiled.steps if step.generated for key in (step.symbol, step.name)}
    if name not in steps:
        hint = near(name, steps) or f"it has {', '.join(step.name for step in compiled.steps if step.generated)}"
        raise UserError(f"graph {graph_name} of {run.folder} has no kernel {name}", hint=hint)
    part = next(parts_with(steps[name], graph, compiled, subject), None)
    if part is None:
        raise UserError(f"{word} cannot be run alone: {OTHER_KERNELS}", hint=f"use {run.folder}:{graph_name}")
    return _case_of(word, part)


def _case_of(name: str, graph: Graph) -> Case:
    return Case(name, graph.module, graph.inputs)
