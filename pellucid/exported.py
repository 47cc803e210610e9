"""Programs of `torch.export`, compiled for deployment: Dynamo takes no part, and nothing of the module is guarded.

    exported = torch.export.export(model.eval(), (x,))
    run = pellucid.compile_exported(exported, options={"freeze": True})
    y = run(x)

What the program was exported for holds: each call looks at sizes, dtypes and strides of its arguments alone.
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

# What follows from so many different kinds of arguments is kept.
_KINDS = 64


def compile_exported(program: ExportedProgram, *, options: Mapping[str, object] | None = None) -> CompiledProgram:
    """Compile an exported program for inference.

    options: see `pellucid.options.Options`. Parameters and buffers stay those of the program: what changes in their
    values, also by way of `.data`, has the effect that it has under `torch.compile`; another dtype, shape or layout is
    an error at the next call. What takes their place in the program (`load_state_dict(assign=True)`) is not seen.

    Raises UserError for an unknown option, and for a program that takes or returns other than tensors and constants.
    """
    if not isinstance(program, ExportedProgram):
        what = f"compile_exported takes what torch.export.export returns, not a {type(program).__name__}"
        raise UserError(what, hint="export the model first, or use torch.compile(model, backend='pellucid')")
    return CompiledProgram(program, options)


class CompiledProgram:
    """Runs an exported program without gradients, in any number of threads.

    It is called with arguments like those that the program was exported with. Tensors that lie otherwise in memory are
    copied. What is compiled holds for all sizes that the program was exported for, but where something in it depends on
    them: then it is compiled again for sizes that are met later.
    """

    def __init__(self, program: ExportedProgram, options: Mapping[str, object] | None) -> None:
        assert program.call_spec.in_spec is not None and program.call_spec.out_spec is not None
        self._takes, self._returns = program.call_spec.in_spec, program.call_spec.out_spec
        args, kwargs = self._takes.children()
        self._by_position = args.num_children if args.num_leaves == args.num_children and not kwargs.num_leaves else -1
        self._exported = read_exported(program)
        self._compile = partial(compile_fx, options=options)
        self._made: list[Specialised] = []
        self._bound: dict[tuple[_Kind, ...], _Bound] = {}
        self._lock = Lock()
        self._fixed = _Fixed(self._exported)
        self._specialised(self._exported.example)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UserError for arguments that the program was not exported for, and ones that require gradients."""
        tensors = not kwargs and len(args) == self._by_position and all(isinstance(each, torch.Tensor) for each in args)
        leaves = args if tensors else _leaves(args, kwargs, self._takes)
        kinds = tuple([_kind_of(each) for each in leaves])
        bound = self._bound.get(kinds) or self._bind(kinds, leaves)
        given = [*bound.before, *[leaves[number] for number in bound.taken]]
        self._fixed.check()
        if self._exported.changed:
            _check_apart(given, len(bound.before), self._exported.changed, self._fixed.storages)
        with torch.no_grad(), _without_autocast():
            copied = [(at, given[at], _laid_out(given[at], strides)) for at, strides in bound.copied]
            for at, _, copy in copied:
                given[at] = copy
            made = bound.run(*given)
            for at, tensor, copy in copied:
                if at in self._exported.changed and not _is_as_copied(copy):
                    tensor.copy_(copy)
        results = [each.value if isinstance(each, Constant) else made[each] for each in self._exported.results]
        return pytree.tree_unflatten(results, self._returns)

    def __reduce__(self) -> NoReturn:
        hint = "keep the exported program with torch.export.save, and compile what torch.export.load returns"
        raise UserError("a compiled program can be neither copied nor pickled", hint=hint)

    def _bind(self, kinds: tuple[_Kind, ...], leaves: Sequence[Any]) -> _Bound:
        """What a call with arguments of these kinds does."""
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
        except AttributeError as error:  # of an example that is a part of a tensor, it asks for the sizes of the whole
            what = f"what the program asks of its arguments cannot be told of these: {error}"
            raise UserError(what, hint="export it with a copy as the example") from None

    def _specialised(self, values: Mapping[Any, int]) -> Specialised:
        with self._lock:
            for made in self._made:
                if made.holds(values):
                    return made
            made = specialise(self._exported, values, self._compile)
            self._made.append(made)
            return made


class _Fixed:
    """Parameters, buffers and constants of a program, which may change in their values alone.

    storages: in which they lie, and whether the program may change what lies there.
    """

    def __init__(self, exported: Exported) -> None:
        self._tensors = list(exported.fixed)
        self._layouts = [_layout(tensor) for tensor in self._tensors]
        first = len(exported.symbols)
        self._changed = [number in exported.changed for number in range(first, first + len(self._tensors))]
        self._look()

    def check(self) -> None:
        """Raise UserError where one is another than the program was compiled for."""
        if layout_hash(self._tensors) == self._place:
            return
        for tensor, layout in zip(self._tensors, self._layouts, strict=True):
            if _layout(tensor) != layout:
                what = "{} of shape {} and strides {}"
                now, then = (what.format(*each) for each in (_layout(tensor), layout))
                hint = "compile the exported program again, or change values alone"
                raise UserError(f"a parameter is {now} now, and was {then} when the program was compiled", hint=hint)
        self._look()

    def _look(self) -> None:
        storages: dict[int, bool] = {}
        for tensor, changed in zip(self._tensors, self._changed, strict=True):
            storage = tensor.untyped_storage()._cdata
            storages[storage] = storages.get(storage, False) or changed
        self.storages, self._place = storages, layout_hash(self._tensors)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


# The type of an argument and what it is; of a tensor how it lies in memory, and whether that holds it negated.
_Kind: TypeAlias = "tuple[Any, ...]"


@dataclass(frozen=True, slots=True)
class _Bound:
    """What a call does. run: takes `before` and, of the arguments, those with the numbers in `taken`.

    copied: numbers among all these of tensors that lie otherwise in memory, and the strides that they have to have.
    """

    run: Callable[..., Any]
    before: tuple[Any, ...]
    taken: tuple[int, ...]
    copied: tuple[tuple[int, tuple[int, ...]], ...]


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any], spec: pytree.TreeSpec) -> list[Any]:
    """The arguments, flat. Raises UserError where they are not arranged as when the program was exported."""
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
    """Whether a tensor lies in memory as the program takes it."""
    return has_strides(tensor, strides) and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _is_as_copied(copy: torch.Tensor) -> bool:
    """Whether nothing was written to a copy since `_laid_out` made it: PyTorch counts that, but in inference mode."""
    return not copy.is_inference() and copy._version == 1


def _without_autocast() -> AbstractContextManager[Any]:
    """What the program computes in was decided when it was exported."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def _check_apart(tensors: Sequence[Any], first: int, changed: Collection[int], storages: Mapping[int, bool]) -> None:
    """Raise UserError where an argument shares memory with what the program may change, and would not see it.

    first: of the tensors, the number of the first argument. changed: numbers of the tensors that it may change.
    storages: of parameters and buffers, and whether it may change what lies there.
    """
    given = [(number, each) for number, each in enumerate(tensors[first:], first) if isinstance(each, torch.Tensor)]
    places = sorted((each.data_ptr(), each.data_ptr() + span(each), number in changed) for number, each in given)
    end = end_of_changed = 0
    for begin, last, changes in places:
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
