"""Programs of `torch.export`, compiled for deployment: without Dynamo, and without guards on the module.

    exported = torch.export.export(model.eval(), (x,))
    run = pellucid.compile_exported(exported, options={"freeze": True})
    y = run(x)

The constraints of the export are trusted: a call checks only sizes, dtypes and strides of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pellucid.backend import compile_fx
from pellucid.capture.exported import Constant, Exported, read_exported
from pellucid.capture.inputs import ConstantInput, TensorInput
from pellucid.capture.specialise import Specialised, specialise
from pellucid.errors import UserError
from pellucid.executable import has_strides
from pellucid.native.fingerprint import layout_hash, span
from pellucid.native.locks import Lock

# For how many kinds of arguments the bound calls are cached.
_KINDS = 64


def compile_exported(program: ExportedProgram, *, options: Mapping[str, object] | None = None) -> CompiledProgram:
    """Compile an exported program for inference.

    options: see `pellucid.options.Options`. Parameters and buffers stay those of the program: changes of their values,
    also through `.data`, have the same effect as under `torch.compile`; another dtype, shape or layout is an error at
    the next call. Tensors that replace them in the program (`load_state_dict(assign=True)`) are not used.

    Raises UserError for an unknown option, and for a program that takes or returns other than tensors and constants.
    """
    if not isinstance(program, ExportedProgram):
        what = f"compile_exported takes what torch.export.export returns, not a {type(program).__name__}"
        raise UserError(what, hint="export the model first, or use torch.compile(model, backend='pellucid')")
    return CompiledProgram(program, options)


class CompiledProgram:
    """Runs an exported program without gradients, in any number of threads.

    It is called with arguments like those that the program was exported with. Tensors with other strides are copied.
    The compiled code is valid for all sizes that the program was exported for, unless a decision in it depends on them:
    it is then compiled again for other sizes.
    """

    def __init__(self, program: ExportedProgram, options: Mapping[str, object] | None) -> None:
        assert program.call_spec.in_spec is not None and program.call_spec.out_spec is not None
        self._in_spec, self._out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        args, kwargs = self._in_spec.children()
        self._by_position = args.num_children if args.num_leaves == args.num_children and not kwargs.num_leaves else -1
        self._exported = read_exported(program)
        self._compile = partial(compile_fx, options=options)
        self._specialisations: list[Specialised] = []
        self._bound: dict[tuple[_Kind, ...], _Bound] = {}
        self._lock = Lock()
        self._fixed = _Fixed(self._exported)
        self._specialised(self._exported.example)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UserError for arguments that the program was not exported for, and ones that require gradients."""
        tensors = not kwargs and len(args) == self._by_position and all(isinstance(each, torch.Tensor) for each in args)
        leaves = args if tensors else _leaves(args, kwargs, self._in_spec)
        kinds = tuple([_kind_of(each) for each in leaves])
        bound = self._bound.get(kinds) or self._bind(kinds, leaves)
        given = [*bound.before, *[leaves[number] for number in bound.taken]]
        self._fixed.check()
        if self._exported.changed:
            _check_aliasing(given, len(bound.before), self._exported.changed, self._fixed.storages)
        with torch.no_grad(), _without_autocast():
            copied = [(at, given[at], _laid_out(given[at], strides)) for at, strides in bound.copied]
            for at, _, copy in copied:
                given[at] = copy
            outputs = bound.run(*given)
            for at, tensor, copy in copied:
                if at in self._exported.changed and _was_written(copy):
                    tensor.copy_(copy)
        results = [each.value if isinstance(each, Constant) else outputs[each] for each in self._exported.results]
        return pytree.tree_unflatten(results, self._out_spec)

    def __reduce__(self) -> NoReturn:
        hint = "keep the exported program with torch.export.save, and compile what torch.export.load returns"
        raise UserError("a compiled program can be neither copied nor pickled", hint=hint)

    def _bind(self, kinds: tuple[_Kind, ...], leaves: Sequence[Any]) -> _Bound:
        """Prepare calls with arguments of these kinds."""
        exported = self._exported
        values = exported.inputs.values(leaves)
        self._check_guards(leaves)
        strides = exported.inputs.strides(values)
        before = (*(values[symbol] for symbol in exported.symbols), *exported.fixed)
        taken = [number for number, each in enumerate(exported.inputs.each) if not isinstance(each, ConstantInput)]
        copied = [
            (at, strides[number])
            for at, number in enumerate(taken, start=len(before))
            if isinstance(exported.inputs.each[number], TensorInput) and not _fits(leaves[number], strides[number])
        ]
        bound = _Bound(self._specialised(values).run, before, tuple(taken), tuple(copied))
        with self._lock:
            if len(self._bound) >= _KINDS:
                del self._bound[next(iter(self._bound))]
            self._bound[kinds] = bound
        return bound

    def _check_guards(self, leaves: Sequence[Any]) -> None:
        if self._exported.guards is None:
            return
        try:
            self._exported.guards(*leaves)
        except AssertionError as refusal:
            what = f"the program was not exported for such arguments: {refusal}"
            raise UserError(what, hint="export it for them: `dynamic_shapes`, and an example of such sizes") from None
        except AttributeError as error:  # for an example that is a view, the guards query the sizes of its base
            what = f"the guards of the program cannot be evaluated for these arguments: {error}"
            raise UserError(what, hint="export it with a copy as the example") from None

    def _specialised(self, values: Mapping[Any, int]) -> Specialised:
        with self._lock:
            for known in self._specialisations:
                if known.holds(values):
                    return known
            new = specialise(self._exported, values, self._compile)
            self._specialisations.append(new)
            return new


class _Fixed:
    """Parameters, buffers and constants of a program, of which only the values may change.

    storages: their storages, and whether the program may write to each.
    """

    def __init__(self, exported: Exported) -> None:
        self._tensors = list(exported.fixed)
        self._layouts = [_layout(tensor) for tensor in self._tensors]
        first = len(exported.symbols)
        self._changed = [number in exported.changed for number in range(first, first + len(self._tensors))]
        self._update()

    def check(self) -> None:
        """Raise UserError if one has another dtype, shape or strides than the program was compiled for."""
        if layout_hash(self._tensors) == self._hash:
            return
        for tensor, layout in zip(self._tensors, self._layouts, strict=True):
            if _layout(tensor) != layout:
                what = "{} of shape {} and strides {}"
                now, then = (what.format(*each) for each in (_layout(tensor), layout))
                hint = "compile the exported program again, or change values alone"
                raise UserError(f"a parameter is {now} now, and was {then} when the program was compiled", hint=hint)
        self._update()

    def _update(self) -> None:
        storages: dict[int, bool] = {}
        for tensor, changed in zip(self._tensors, self._changed, strict=True):
            storage = tensor.untyped_storage()._cdata
            storages[storage] = storages.get(storage, False) or changed
        self.storages, self._hash = storages, layout_hash(self._tensors)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


# The type and value of an argument; of a tensor instead its layout, and whether it is lazily negated or conjugated.
_Kind: TypeAlias = "tuple[Any, ...]"


@dataclass(frozen=True, slots=True)
class _Bound:
    """A prepared call. run: is passed `before`, then the arguments with the numbers in `taken`.

    copied: positions among all these of tensors with other strides, and the strides that they must have.
    """

    run: Callable[..., Any]
    before: tuple[Any, ...]
    taken: tuple[int, ...]
    copied: tuple[tuple[int, tuple[int, ...]], ...]


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any], spec: pytree.TreeSpec) -> list[Any]:
    """The arguments, flat. Raises UserError if their structure differs from that of the export."""
    names = spec.child(1).context
    if kwargs.keys() == set(names):
        kwargs = {name: kwargs[name] for name in names}
    leaves, given = pytree.tree_flatten((args, kwargs))
    if given != spec:
        what = f"the program was exported for {_call(spec)}, and is called with {_call(given)}"
        raise UserError(what, hint="call it with arguments like those it was exported with: each * stands for one")
    return leaves


def _call(spec: pytree.TreeSpec) -> str:
    """The arguments of a call: `(*, [*, *], name=*)`."""
    args, kwargs = spec.children()
    named = [f"{name}={_tree(each)}" for name, each in zip(kwargs.context, kwargs.children(), strict=True)]
    return f"({', '.join([*map(_tree, args.children()), *named])})"


def _tree(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "*"
    each = list(map(_tree, spec.children()))
    if spec.type is dict:
        return f"{{{', '.join(f'{key!r}: {value}' for key, value in zip(spec.context, each, strict=True))}}}"
    return f"{'' if spec.type in (list, tuple) else spec.type.__name__}[{', '.join(each)}]"


def _kind_of(value: Any) -> _Kind:
    if not isinstance(value, torch.Tensor):
        return type(value), value if isinstance(value, Hashable) else None  # which no program takes
    if value.requires_grad and torch.is_grad_enabled():
        hint = "call the program under torch.no_grad(), or use torch.compile to train"
        raise UserError("an argument requires a gradient, and exported programs are compiled for inference", hint=hint)
    strides = value.stride() if value.layout is torch.strided else None
    return (
        type(value),
        value.shape,
        strides,
        value.dtype,
        value.device,
        value.is_neg(),
        value.is_conj(),
        value._is_zerotensor(),
    )


def _fits(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether the program can use a tensor without a copy."""
    return has_strides(tensor, strides) and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _was_written(copy: torch.Tensor) -> bool:
    """Whether a copy may have been written to since `_laid_out`: inference tensors have no version counter."""
    return copy.is_inference() or copy._version != 1


def _without_autocast() -> AbstractContextManager[Any]:
    """The dtypes of the program were fixed by its export, so autocast is disabled."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def _check_aliasing(tensors: Sequence[Any], first: int, changed: Collection[int], storages: Mapping[int, bool]) -> None:
    """Raise UserError if an argument shares memory with a tensor that the program may change.

    first: the number of the first argument among the tensors. changed: numbers of the tensors that it may change.
    storages: of parameters and buffers, and whether it may write to each.
    """
    given = [(number, each) for number, each in enumerate(tensors[first:], first) if isinstance(each, torch.Tensor)]
    ranges = sorted((each.data_ptr(), each.data_ptr() + span(each), number in changed) for number, each in given)
    end = end_of_changed = 0
    for begin, last, changes in ranges:
        if begin < (end if changes else end_of_changed):
            raise _shares("another argument")
        end, end_of_changed = max(end, last), max(end_of_changed, last if changes else 0)
    for number, each in given:
        storage = each.untyped_storage()._cdata
        if storage in storages and (number in changed or storages[storage]):
            raise _shares("a parameter or buffer")


def _shares(other: str) -> UserError:
    what = f"an argument shares memory with {other}, and the program may change one of them"
    return UserError(what, hint="give it a copy, or use torch.compile")
