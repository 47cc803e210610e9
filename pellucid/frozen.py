"""A compiled program whose parameters are prepared once: what follows from them, and their matrices packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

import torch

from pellucid.errors import warn
from pellucid.native.fingerprint import Fingerprint
from pellucid.native.function import kernel_function
from pellucid.native.huge_pages import empty_in_huge_pages

_Run: TypeAlias = "Callable[[list[Any]], list[Any]]"

# As often as this may parameters change before somebody is told what that costs.
_CHANGES = 8


@dataclass(frozen=True, slots=True)
class Packer:
    """A function that packs a tensor: the one at `source` among the arguments and then the results of what runs before.

    name, address, numel: see `CppPacking`.
    """

    name: str
    address: int
    numel: int
    source: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What was prepared, and of what: sources are the parameters, which it does not keep alive."""

    fingerprint: Fingerprint
    sources: tuple[ReferenceType[torch.Tensor], ...]
    tensors: tuple[torch.Tensor, ...]

    def is_stale(self) -> bool:
        """Whether one of the parameters is gone, or lies elsewhere."""
        found = (source() for source in self.sources)
        pairs = zip(found, self.fingerprint.pointers, strict=True)
        return any(tensor is None or tensor.data_ptr() != pointer for tensor, pointer in pairs)


class Frozen:
    """Runs `main` with the caller's arguments, then the results of `before`, then panels.

    Called with the list of the graph's arguments, which is emptied. At each call it looks whether the arguments at
    `positions` are as they were (`Fingerprint`), and prepares again what is not. Any number of threads may call it.
    Modules that run the same code share one program: of each, what was prepared is kept while its parameters live.

    Before: `main(x, w)` packs w at each call. After: `main(x, w, panels of w)` finds it packed.
    """

    _boxed_call = True

    def __init__(
        self,
        main: _Run,
        before: _Run,
        positions: Sequence[int],
        packers: Sequence[Packer],
        unread: Sequence[int] = (),
        name: str = "program",
    ) -> None:
        """unread: results of `before` that are needed packed alone. name: of the program."""
        self._main = main
        self._before = before
        self._positions = tuple(positions)
        self._packers = tuple(packers)
        self._unread = tuple(unread)
        self._name = name
        self._lock = Lock()
        self._prepared: dict[tuple[int, ...], _Prepared] = {}
        self._changes = 0

    def __call__(self, args: list[Any]) -> list[Any]:
        frozen = [args[position] for position in self._positions]
        prepared = self._found(frozen) or self._prepare(args, frozen)
        args.extend(prepared.tensors)
        return self._main(args)

    def _found(self, frozen: list[torch.Tensor]) -> _Prepared | None:
        """What was prepared of these tensors, if they are as they were."""
        prepared = self._prepared.get(_key(frozen))
        return prepared if prepared is not None and prepared.fingerprint.holds(frozen) else None

    def _prepare(self, args: list[Any], frozen: list[torch.Tensor]) -> _Prepared:
        with self._lock:
            prepared = self._found(frozen)
            if prepared is not None:
                return prepared  # another thread was here
            self._forget(_key(frozen))  # its memory goes first
            fingerprint = Fingerprint.of(frozen)
            made = self._before(list(args))
            panels = _packed(self._packers, [*args, *made])
            for number in self._unread:
                made[number] = torch.empty(0)  # what it was need not be kept
            prepared = _Prepared(fingerprint, tuple(map(ref, frozen)), (*made, *panels))
            self._prepared = {**self._prepared, _key(frozen): prepared}
            return prepared

    def _forget(self, key: tuple[int, ...]) -> None:
        """Drop what was prepared of these tensors, and of others that are gone."""
        kept = {each: prepared for each, prepared in self._prepared.items() if each != key and not prepared.is_stale()}
        changed, self._prepared = len(kept) < len(self._prepared), kept
        self._changes += changed
        if changed and self._changes == _CHANGES:
            warn(
                f"the parameters of {self._name} have changed {_CHANGES} times, and were prepared again each time: "
                "the option `freeze` is for models whose parameters stay as they are"
            )


def _key(frozen: list[torch.Tensor]) -> tuple[int, ...]:
    """Where the first and the last of some tensors lie: modules of which both do so too are told apart at each call."""
    return tuple(tensor.data_ptr() for tensor in (*frozen[:1], *frozen[-1:]))


def _packed(packers: Sequence[Packer], tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The panels of matrices. Shapes: [packer.numel], f32."""
    found = empty_in_huge_pages([packer.numel for packer in packers])
    for packer, panels in zip(packers, found, strict=True):
        kernel_function(packer.name, packer.address)([tensors[packer.source], panels], [], 1)
    return found
