"""The store of compiled graphs on disk: list, summarise, verify, export, import and trim it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from pellucid.errors import StoreError
from pellucid.kit.shown import Shown
from pellucid.native import archive, inventory
from pellucid.native.build import default_store
from pellucid.native.inventory import FILE, KERNELS, PROGRAM, STRANGE, TRIAL, WORK, Entry, contents, problems
from pellucid.native.store import check_parents, check_safe, default_root, key_folders
from pellucid.native.toolchain import misfit, note_of
from pellucid.printing import Table, code, name, place, sentence
from pellucid.reuse import stale

_MAX_ROWS = 10  # rows of one kind that are printed; `--json` has all of them
_BAD = "bold red"
_TITLES = {
    PROGRAM: "graphs: compiled programs",
    KERNELS: "kernels: libraries of several kernels each",
    TRIAL: "trials: which of several kernels is the fastest here",
    FILE: "headers, runtimes and code that kernels share",
    WORK: "being written, or left by a process that died",
    STRANGE: "files that do not belong to the store",
}
_COUNTED = {
    PROGRAM: "graph",
    KERNELS: "library",
    TRIAL: "trial",
    FILE: "file",
    WORK: "unfinished file",
    STRANGE: "unknown file",
}


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of the store. key: of its folder. made, used: seconds since 1970. size: in bytes.

    line: of the user's program where a graph begins. calls: the operators that it calls first. graphs: what it was
    compiled to: kind, nodes, kernels. kernels: names; of a trial the fastest first. threads: the number for which a
    graph was compiled. problem: what is wrong with it, or why it is not used here; empty where that was not checked.
    """

    kind: str
    key: str
    name: str
    size: int
    made: float
    used: float
    line: str = ""
    calls: str = ""
    graphs: tuple[dict[str, Any], ...] = ()
    kernels: tuple[str, ...] = ()
    threads: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """A folder of the store: for which toolchain and machine. misfit: why nothing in it is used here."""

    key: str
    built_for: str
    misfit: str
    entries: int
    size: int


@dataclass(frozen=True, slots=True)
class Listed(Shown):
    """items: the most recently used first."""

    root: str
    keys: tuple[Key, ...]
    items: tuple[Item, ...]

    @property
    def good(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Sizes(Shown):
    """sizes: bytes by kind. counts: entries by kind. kernels: the number in all libraries together."""

    root: str
    keys: tuple[Key, ...]
    counts: dict[str, int]
    sizes: dict[str, int]
    kernels: int

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    @property
    def good(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Verified(Shown):
    """bad: entries that are damaged, incomplete or untrusted. unused: intact ones that no process here would use.

    unsafe: why nothing in a directory is trusted. removed: whether the bad entries were removed.
    """

    root: str
    checked: int
    bad: tuple[Item, ...]
    unused: tuple[Item, ...]
    unsafe: tuple[str, ...]
    removed: bool

    @property
    def good(self) -> bool:
        return not self.unsafe and (self.removed or not self.bad)


@dataclass(frozen=True, slots=True)
class Carried(Shown):
    """The entries exported or imported. size: of the archive. left_out: with their problems."""

    what: str
    file: str
    key: str
    size: int
    moved: tuple[Item, ...]
    present: tuple[Item, ...]
    left_out: tuple[Item, ...]
    notes: tuple[str, ...]

    @property
    def good(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Trimmed(Shown):
    """removed: the entries removed, or that would be. left: remaining bytes. tried: whether it was a dry run."""

    root: str
    removed: tuple[Item, ...]
    left: int
    tried: bool

    @property
    def good(self) -> bool:
        return True


def listed() -> Listed:
    """List all entries of the store. Nothing is checked or unpickled."""
    keys, entries = _all()
    items = sorted(map(_item, entries), key=lambda item: -item.used)
    return Listed(str(default_root()), keys, tuple(items))


def sizes() -> Sizes:
    """Count the entries and bytes of each kind."""
    keys, entries = _all()
    counts, nbytes = Counter[str](), Counter[str]()
    for entry in entries:
        counts[entry.kind] += 1
        nbytes[entry.kind] += entry.nbytes
    kernels = sum(len(entry.about["kernels"]) for entry in entries if entry.kind == KERNELS)
    return Sizes(str(default_root()), keys, dict(counts), dict(nbytes), kernels)


def verified(remove: bool = False) -> Verified:
    """Read every entry and check it. remove: remove those that are damaged, incomplete or untrusted."""
    root = default_root()
    checked, bad, unused = 0, list[Item](), list[Item]()
    for folder in key_folders(root):
        elsewhere = misfit(folder.name, note_of(folder))
        for entry, why in problems(folder):
            checked += 1
            if why:
                bad.append(_item(entry, why))
                if remove and entry.kind != STRANGE:
                    inventory.discard(entry)
            elif why := elsewhere or _unfound(entry):
                unused.append(_item(entry, why))
    return Verified(str(root), checked, tuple(bad), tuple(unused), tuple(_unsafe(root)), remove)


def _unfound(entry: Entry) -> str:
    """Why no process looks up an entry; empty where one may."""
    if entry.kind == PROGRAM:
        return stale(entry.about)
    return "no kernel uses it" if inventory.is_orphan(entry) else ""


def exported(file: Path) -> Carried:
    """Write the entries for this machine to an archive. Raises UserError where there are none."""
    store = default_store()
    return _carried("exported to", file, store.key, archive.export(store.directory, file, stale))


def imported(file: Path) -> Carried:
    """Add an archive to the store. Raises StoreError for one that is unusable here, or untrusted."""
    key, found = archive.install(file, default_root(), stale)
    return _carried("imported from", file, key, found)


def trimmed(unused_s: float | None, nbytes: int | None, tried: bool = False) -> Trimmed:
    """Remove entries unused for `unused_s` seconds, then the least recently used until at most `nbytes` are left.

    tried: a dry run. Raises StoreError where nothing can be removed.
    """
    root = default_root()
    removed = inventory.trim(root, unused_s, nbytes, (lambda _: None) if tried else None)
    left = sum(entry.nbytes for entry in _all()[1]) - (sum(entry.nbytes for entry in removed) if tried else 0)
    return Trimmed(str(root), tuple(map(_item, removed)), left, tried)


def _all() -> tuple[tuple[Key, ...], list[Entry]]:
    keys: list[Key] = []
    entries: list[Entry] = []
    for folder in key_folders(default_root()):
        found, note = contents(folder), note_of(folder)
        entries += found
        size = sum(entry.nbytes for entry in found)
        keys.append(Key(folder.name, _built_for(note), misfit(folder.name, note), len(found), size))
    return tuple(sorted(keys, key=lambda key: bool(key.misfit))), entries


def _built_for(note: dict[str, object]) -> str:
    if not note:
        return "built for an unknown toolchain and machine"
    parts = (
        f"{note.get('kind')} {note.get('version')}",
        note.get("isa"),
        note.get("cpu"),
        f"PyTorch {note.get('torch')}",
    )
    return ", ".join(map(str, parts))


def _item(entry: Entry, why: str = "") -> Item:
    about = entry.about
    kernels, fastest = tuple(about.get("kernels", ())), about.get("fastest")
    return Item(
        kind=entry.kind,
        key=entry.folder.name,
        name=entry.name,
        size=entry.nbytes,
        made=entry.made,
        used=entry.used,
        line=str(about.get("line", "")),
        calls=str(about.get("calls", "")),
        graphs=tuple(about.get("graphs", ())),
        kernels=tuple(sorted(kernels, key=lambda each: each != fastest)),
        threads=int(about.get("threads", 0)),
        problem=why,
    )


def _unsafe(root: Path) -> Iterator[str]:
    """Why directories are not used: other users can write to them."""
    if not root.exists():
        return
    inner = [each for key in key_folders(root) for each in (key, *(path for path in key.iterdir() if path.is_dir()))]
    for check, directories in ((check_parents, [root]), (check_safe, [root, *inner])):
        for directory in directories:
            try:
                check(directory)
            except StoreError as error:
                yield f"{error.message} ({error.hint})"


def _carried(what: str, file: Path, key: str, found: archive.Moved) -> Carried:
    threads = {int(entry.about.get("threads", 0)) for entry in found.moved if entry.kind == PROGRAM}
    notes = list(found.notes)
    if what.startswith("imported") and threads - {torch.get_num_threads()}:
        counts = " or ".join(map(str, sorted(threads)))
        notes.append(f"graphs were compiled for {counts} threads, and are only used by processes with as many")
    moved, present = tuple(map(_item, found.moved)), tuple(map(_item, found.present))
    left_out = tuple(_item(entry, why) for entry, why in found.left_out)
    return Carried(what, str(file), key, file.stat().st_size, moved, present, left_out, tuple(notes))


# ---------------------------------------------------------------------------------------------- printing


def cache_text(found: Listed | Sizes | Verified | Carried | Trimmed) -> Iterator[RenderableType]:
    """Render what `pellucid cache` prints."""
    match found:
        case Listed():
            yield from _listed(found)
        case Sizes():
            yield from _sizes(found)
        case Verified():
            yield from _verified(found)
        case Carried():
            yield from _carried_text(found)
        case Trimmed():
            yield from _trimmed(found)


def _listed(found: Listed) -> Iterator[RenderableType]:
    """A table for each kind, then the keys, also those of other machines and versions."""
    if not found.keys:
        yield sentence(f"there is no store yet: {found.root}")
    for kind in _TITLES:
        items = [item for item in found.items if item.kind == kind]
        if items:
            yield sentence((_TITLES[kind], "bold"))
            rows = [(_size(each.size), _age(each.made), _age(each.used), _what(each)) for each in items[:_MAX_ROWS]]
            yield Table(("size", "created", "used", "what"), rows, right=frozenset((0,)))
            if len(items) > _MAX_ROWS:
                rest = sum(item.size for item in items[_MAX_ROWS:])
                yield sentence(f"and {_many(kind, len(items) - _MAX_ROWS)} more, {_size(rest)}; --json lists all")
    yield from _keys(found.root, found.keys)


def _what(item: Item) -> tuple[Any, ...]:
    """The cell that describes an entry."""
    if item.kind == KERNELS:
        first = name(item.kernels[0]) if item.kernels else name(item.name)
        more = len(item.kernels) - 1
        return (first, *((sentence(f"and {more} more"),) if more > 0 else ()))
    if item.kind == TRIAL and item.kernels:
        return (name(item.kernels[0], "", f" of {len(item.kernels)}"),)
    if item.kind != PROGRAM:
        return (name(item.name),)
    graphs = "; ".join(
        f"{each['kind']}: {_counted('call', each['nodes'])}, {_counted('kernel', each['kernels'])}"
        for each in item.graphs
    )
    begins = place(item.line) if item.line else sentence(f"{item.calls}, ...") if item.calls else name(item.name)
    return (begins, sentence(f"{graphs}; {_counted('thread', item.threads)}"))


def _keys(root: str, keys: Sequence[Key]) -> Iterator[RenderableType]:
    """The path of the store, and the toolchain of each key."""
    if not keys:
        return
    yield sentence((f"in {root}", "bold"))
    for key in keys:
        yield code(f"{key.key}  {_size(key.size)}")
        used = f"not used here: {key.misfit}" if key.misfit else "used here"
        yield sentence(f"  {key.built_for}; {used}", hang=4)


def _sizes(found: Sizes) -> Iterator[RenderableType]:
    rows = [
        (_size(found.sizes[kind]), f"{_many(kind, found.counts[kind])}" + _of_kernels(kind, found.kernels))
        for kind in _COUNTED
        if kind in found.sizes
    ]
    yield Table((), [*rows, (_size(found.size), "in total")], right=frozenset((0,)))
    yield from _keys(found.root, found.keys)


def _of_kernels(kind: str, kernels: int) -> str:
    return f" of {_counted('kernel', kernels)}" if kind == KERNELS else ""


def _verified(found: Verified) -> Iterator[RenderableType]:
    for why in found.unsafe:
        yield sentence((why, _BAD))
    if found.bad:
        done = "removed" if found.removed else "they are ignored; `pellucid cache verify --remove` removes them"
        yield sentence((f"{len(found.bad)} of {found.checked} entries are bad", _BAD), f": {done}")
        yield from _problems(found.bad)
    if found.unused:
        yield sentence((f"{len(found.unused)} are intact but not used here", "bold"))
        yield from _problems(found.unused)
    if not found.bad and not found.unsafe:
        yield sentence(f"all {found.checked} entries are intact, in {found.root}")


def _problems(items: Sequence[Item]) -> Iterator[RenderableType]:
    """Entries grouped by what is wrong with them."""
    by_reason: dict[str, list[Item]] = {}
    for item in items:
        by_reason.setdefault(item.problem, []).append(item)
    rows = [(_many_of(each), (sentence(why), name(each[0].name))) for why, each in by_reason.items()]
    yield Table(("entries", "why, and the first entry"), rows[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        yield sentence(f"and {len(rows) - _MAX_ROWS} more reasons; --json lists all")


def _carried_text(found: Carried) -> Iterator[RenderableType]:
    yield sentence(f"{found.what} {found.file} ({_size(found.size)}): {_many_of(found.moved) or 'nothing'}")
    if found.present:
        yield sentence(f"already present: {_many_of(found.present)}")
    if found.left_out:
        yield sentence(("left out", "bold"))
        yield from _problems(found.left_out)
    yield from map(sentence, found.notes)


def _trimmed(found: Trimmed) -> Iterator[RenderableType]:
    freed = sum(item.size for item in found.removed)
    done = "would be removed" if found.tried else "removed"
    yield sentence(f"{done}: {_many_of(found.removed) or 'nothing'}, {_size(freed)}; {_size(found.left)} left")


def _many_of(items: Sequence[Item]) -> str:
    counts = Counter(item.kind for item in items)
    return ", ".join(_many(kind, counts[kind]) for kind in _COUNTED if counts[kind])


def _many(kind: str, count: int) -> str:
    return _counted(_COUNTED[kind], count)


def _counted(one: str, count: int) -> str:
    return f"{count} {one if count == 1 else one.removesuffix('y') + 'ies' if one.endswith('y') else one + 's'}"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.{0 if nbytes >= 10 * size else 1}f} {unit}"
    return f"{nbytes} B"


def _age(when: float) -> str:
    """The time since `when`, rounded."""
    seconds = time.time() - when
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"
