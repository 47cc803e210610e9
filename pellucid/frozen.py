"""A compiled program whose parameters are prepared once: values computed from them, and packed matrices."""

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

# After this many changes of parameters the user is warned of their cost.
_CHANGES = 8

# Maximum of prepared bytes for several sets of parameters, per byte of parameters. One set is always kept.
_MAX_RATIO = 4


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The prepared form of some parameters, without a reference to their memory.

    tensors: the results of `before`, then the panels. panels: only these, so that other programs find them.
    sources: the bytes of the parameters' storages, by address.
    watch: weak references to these storages, with a callback for when one is freed.
    """

    fingerprint: Fingerprint
    tensors: tuple[torch.Tensor, ...]
    panels: tuple[Panels, ...]
    sources: dict[int, int]
    watch: tuple[ReferenceType[torch.UntypedStorage], ...]


class Frozen:
    """Runs `main` with the caller's arguments, then the results of `before`, then panels.

    Called with the list of the graph's arguments, which is emptied. Each call checks whether the arguments at
    `positions` are unchanged (`Fingerprint`), and prepares them again if not. Any number of threads may call it.
    Modules that run the same code share one program: prepared parameters of each are kept while its parameters live.

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
        """addresses: of the functions of `packers`. unread: results of `before` that only the packing reads.

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
        self._prepared: dict[int, _Prepared] = {}  # by the layout hash of the parameters, the oldest first
        self._changes = 0

    def __getstate__(self) -> dict[str, Any]:
        """The state for a later process, which has its own parameters and finds the functions in the store."""
        transient = ("_addresses", "_lock", "_prepared", "_changes")
        return {name: value for name, value in self.__dict__.items() if name not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load(build({packer.name: packer.source for packer in self._packers})[0])

    def __call__(self, args: list[Any]) -> list[Any]:
        frozen = [args[position] for position in self._positions]
        key = layout_hash(frozen)
        prepared = self._prepared.get(key)
        if prepared is not None and not prepared.fingerprint.holds(frozen):
            self._drop(key, prepared)
            prepared = None  # frees its memory before new memory is allocated
        if prepared is None:
            prepared = self._prepare(args, frozen, key)
        args.extend(prepared.tensors)
        return self._main(args)

    def _prepare(self, args: list[Any], frozen: list[torch.Tensor], key: int) -> _Prepared:
        with self._lock:
            prepared = self._prepared.get(key)
            if prepared is not None and prepared.fingerprint.holds(frozen):
                return prepared  # by another thread
            _check_memory(frozen, self._positions)
            fingerprint = Fingerprint.of(frozen)
            results = self._before(list(args))
            panels = pack(self._packers, self._addresses, [*args, *results], len(args))
            for number in self._unread:
                results[number] = torch.empty(0)  # frees it
            on_free = _OnFree(self)
            storages = [tensor.untyped_storage() for tensor in frozen]
            sources = {storage._cdata: storage.nbytes() for storage in storages}
            # References to storages, not tensors: PyTorch cannot swap tensors that have weak references.
            watch = tuple(ref(storage, on_free) for storage in storages)
            tensors = (*results, *(each.tensor for each in panels))
            prepared = _Prepared(fingerprint, tensors, tuple(panels), sources, watch)
            self._keep(key, prepared)
            return prepared

    def _keep(self, key: int, prepared: _Prepared) -> None:
        """Keep prepared parameters, and as many of the latest others as the limit allows."""
        self.sweep()
        kept = {**self._prepared, key: prepared}
        while len(kept) > 1 and _bytes_kept(kept.values()) > _MAX_RATIO * _bytes_of_sources(kept.values()):
            del kept[next(iter(kept))]
            self._count()
        self._prepared = kept

    def _drop(self, key: int, prepared: _Prepared) -> None:
        """Drop the prepared form of parameters that have changed since."""
        with self._lock:
            if self._prepared.get(key) is prepared:
                self._prepared = {each: other for each, other in self._prepared.items() if each != key}
                self._count()

    def sweep(self) -> None:
        """Drop the prepared form of parameters whose memory was freed."""
        self._prepared = {key: each for key, each in self._prepared.items() if not each.fingerprint.is_gone()}

    def _count(self) -> None:
        self._changes += 1
        if self._changes == _CHANGES:
            warn(
                f"the parameters of {self._name} have changed {_CHANGES} times, and were prepared again each time: "
                "the option `freeze` is for models whose parameters stay as they are"
            )


def _check_memory(tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> None:
    """Raise RuntimeError, as a call without `freeze` does, for a parameter whose storage was resized to 0 bytes."""
    for tensor, position in zip(tensors, positions, strict=True):
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise RuntimeError(
                f"argument {position} is a tensor of {tensor.numel()} elements whose storage has 0 bytes: "
                "it was resized, and has to be filled again before the call"
            )


class _OnFree:
    """Called when the storage of a parameter is freed: schedules its prepared form for removal."""

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
    """After a garbage collection, sweep all programs of which parameters were freed."""
    if phase == "stop" and _to_sweep:
        programs = list(_to_sweep)
        _to_sweep.clear()
        for program in programs:
            program.sweep()


def _bytes_kept(prepared: Iterable[_Prepared]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for each in prepared for tensor in each.tensors}.values())


def _bytes_of_sources(prepared: Iterable[_Prepared]) -> int:
    return sum({address: size for each in prepared for address, size in each.sources.items()}.values())
