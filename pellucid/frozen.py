"""A compiled program whose parameters are prepared once: what follows from them, and their matrices packed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakSet, ref

import torch

from pellucid.errors import warn
from pellucid.native.build import build
from pellucid.native.fingerprint import Fingerprint, layout_hash
from pellucid.native.panels import Packer, Panels, pack

_Run: TypeAlias = "Callable[[list[Any]], list[Any]]"

# As often as this may parameters change before somebody is told what that costs.
_CHANGES = 8

# How much memory may be kept for several sets of parameters, next to their own. What one set needs is kept in any case.
_MOST = 4


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What was prepared of some parameters, whose memory it does not keep.

    tensors: what was made of them, and then the panels. panels: these alone, so that other programs find them.
    sources: the bytes of the parameters' memory, by its address.
    watch: calls somebody when the memory of one of them goes.
    """

    fingerprint: Fingerprint
    tensors: tuple[torch.Tensor, ...]
    panels: tuple[Panels, ...]
    sources: dict[int, int]
    watch: tuple[ReferenceType[torch.UntypedStorage], ...]


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
        addresses: Mapping[str, int],
        unread: Sequence[int] = (),
        name: str = "program",
    ) -> None:
        """addresses: of the functions of `packers`. unread: results of `before` that are needed packed alone.

        name: of the program.
        """
        self._main = main
        self._before = before
        self._positions = tuple(positions)
        self._packers = tuple(packers)
        self._unread = tuple(unread)
        self._name = name
        self._load(addresses)

    def _load(self, addresses: Mapping[str, int]) -> None:
        self._addresses = addresses
        self._lock = Lock()
        self._prepared: dict[int, _Prepared] = {}  # by the place of the parameters, the oldest first
        self._changes = 0

    def __getstate__(self) -> dict[str, Any]:
        """What a later process needs: it has parameters of its own, and finds the functions in the store."""
        here = ("_addresses", "_lock", "_prepared", "_changes")
        return {name: value for name, value in self.__dict__.items() if name not in here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load(build({packer.name: packer.source for packer in self._packers})[0])

    def __call__(self, args: list[Any]) -> list[Any]:
        frozen = [args[position] for position in self._positions]
        place = layout_hash(frozen)
        prepared = self._prepared.get(place)
        if prepared is not None and not prepared.fingerprint.holds(frozen):
            self._drop(place, prepared)
            prepared = None  # its memory goes first
        if prepared is None:
            prepared = self._prepare(args, frozen, place)
        args.extend(prepared.tensors)
        return self._main(args)

    def _prepare(self, args: list[Any], frozen: list[torch.Tensor], place: int) -> _Prepared:
        with self._lock:
            prepared = self._prepared.get(place)
            if prepared is not None and prepared.fingerprint.holds(frozen):
                return prepared  # another thread was here
            _check_memory(frozen, self._positions)
            fingerprint = Fingerprint.of(frozen)
            made = self._before(list(args))
            panels = pack(self._packers, self._addresses, [*args, *made], len(args))
            for number in self._unread:
                made[number] = torch.empty(0)  # what it was need not be kept
            gone = _Gone(self)
            storages = [tensor.untyped_storage() for tensor in frozen]
            sources = {storage._cdata: storage.nbytes() for storage in storages}
            # Of their memory, not of the tensors: PyTorch exchanges no tensors of which there are weak references.
            watch = tuple(ref(storage, gone) for storage in storages)
            tensors = (*made, *(each.tensor for each in panels))
            prepared = _Prepared(fingerprint, tensors, tuple(panels), sources, watch)
            self._keep(place, prepared)
            return prepared

    def _keep(self, place: int, prepared: _Prepared) -> None:
        """Keep it, and of others the latest that there is room for."""
        self.sweep()
        kept = {**self._prepared, place: prepared}
        while len(kept) > 1 and _bytes_kept(kept.values()) > _MOST * _bytes_of_sources(kept.values()):
            del kept[next(iter(kept))]
            self._count()
        self._prepared = kept

    def _drop(self, place: int, prepared: _Prepared) -> None:
        """Forget what was prepared of parameters that have changed since."""
        with self._lock:
            if self._prepared.get(place) is prepared:
                self._prepared = {each: other for each, other in self._prepared.items() if each != place}
                self._count()

    def sweep(self) -> None:
        """Forget what was prepared of parameters that are gone."""
        self._prepared = {place: each for place, each in self._prepared.items() if not each.fingerprint.is_gone()}

    def _count(self) -> None:
        self._changes += 1
        if self._changes == _CHANGES:
            warn(
                f"the parameters of {self._name} have changed {_CHANGES} times, and were prepared again each time: "
                "the option `freeze` is for models whose parameters stay as they are"
            )


def _check_memory(tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> None:
    """Raise RuntimeError, as a call without `freeze` does, for a parameter whose memory was given back."""
    for tensor, position in zip(tensors, positions, strict=True):
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise RuntimeError(
                f"argument {position} is a tensor of {tensor.numel()} elements whose storage has 0 bytes: "
                "it was resized, and has to be filled again before the call"
            )


class _Gone:
    """Called when the memory of a parameter goes: what was prepared of it may go too."""

    def __init__(self, program: Frozen) -> None:
        self._program = ref(program)

    def __call__(self, _: ReferenceType[torch.UntypedStorage]) -> None:
        program = self._program()
        if program is not None:
            _to_sweep.add(program)
            if _sweep_all not in gc.callbacks:
                gc.callbacks.append(_sweep_all)


_to_sweep: WeakSet[Frozen] = WeakSet()


def _sweep_all(phase: str, _: dict[str, int]) -> None:
    """Sweep all programs of which parameters went, after Python has collected garbage."""
    if phase == "stop" and _to_sweep:
        programs = list(_to_sweep)
        _to_sweep.clear()
        for program in programs:
            program.sweep()


def _bytes_kept(prepared: Iterable[_Prepared]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for each in prepared for tensor in each.tensors}.values())


def _bytes_of_sources(prepared: Iterable[_Prepared]) -> int:
    return sum({place: size for each in prepared for place, size in each.sources.items()}.values())
