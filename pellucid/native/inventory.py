"""What lies in a store: its entries with their sizes and times, checked where that is asked for, and removed.

An entry is what comes and goes as one: a compiled graph, a library with the kernels that name it, what came out of a
trial, or an auxiliary file with its checksum. What is damaged counts as missing when the compiler looks for it, so
nothing here is needed for correct results.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.errors import StoreError
from pellucid.native.store import (
    STALE_S,
    age,
    checksum_of,
    distrust,
    first_line,
    header_of,
    json_object,
    key_folders,
    read_program,
)
from pellucid.native.trials import parse

PROGRAM, KERNELS, TRIAL, FILE, WORK, STRANGE = "program", "kernels", "trial", "file", "work", "strange"
"""Kinds of entries: a graph, a library of kernels, which of several kernels is the fastest, an auxiliary file, work in
progress, and what is not the store's."""

_IN_USE_S = 3600  # a compiler may read the header, or a process load the runtime, that it has just looked up


@dataclass(frozen=True, slots=True)
class Entry:
    """Sizes in bytes, times in seconds since 1970.

    paths: its files, those first by which it is found. about: what is said of it: of a program `line`, `graphs` and
    more (see `reuse.py`), of a library the names of its `kernels`, of a trial what it says (see `trials.py`).
    """

    kind: str
    folder: Path
    name: str
    paths: tuple[Path, ...]
    nbytes: int
    made: float
    used: float
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])


def contents(folder: Path) -> list[Entry]:
    """The entries under one key. Nothing is unpickled, and no link is followed."""
    found = [*_programs(folder), *_kernels(folder), *_trials(folder), *_files(folder), *_work(folder)]
    known = {"kernels", "batches", "files", "programs", "trials", "locks", "tmp", "toolchain.json"}
    return found + [_entry(STRANGE, folder, [path]) for path in _paths(folder) if path.name not in known]


def _programs(folder: Path) -> Iterator[Entry]:
    for path in _paths(folder / "programs"):
        if not path.name.startswith("."):
            header = header_of(path)
            about = {name: value for name, value in header.items() if name not in ("sum", "bytes", "made")}
            yield _entry(PROGRAM, folder, [path], made=header.get("made"), about=about)


def _kernels(folder: Path) -> Iterator[Entry]:
    """Each library with the kernels that name it; a kernel that names none by itself."""
    libraries: dict[str, list[Path]] = {}
    for path in _paths(folder / "batches"):
        if path.suffix in (".so", ".cpp") and not path.name.startswith("."):
            libraries.setdefault(path.stem, [])
    for path in _paths(folder / "kernels"):
        if not path.name.startswith("."):
            named = Path(str(kernel_note(path).get("library", ""))).stem
            libraries.setdefault(named if named in libraries else f"{path.name} (no library)", []).append(path)
    for name, kernels in libraries.items():
        pair = [path for path in (folder / "batches" / f"{name}{suffix}" for suffix in (".so", ".cpp")) if _is(path)]
        about = {"kernels": [path.name for path in kernels]}
        made = _stat(pair[0]).st_mtime if pair else None
        yield _entry(KERNELS, folder, [*kernels, *pair], name, made, kernels, about)


def _trials(folder: Path) -> Iterator[Entry]:
    for path in _paths(folder / "trials"):
        if not path.name.startswith("."):
            found = parse(first_line(path))
            about = {"kernels": list(found.kernels), "fastest": found.fastest, "ns": list(found.ns)} if found else {}
            yield _entry(TRIAL, folder, [path], about=about)


def _files(folder: Path) -> Iterator[Entry]:
    for path in _paths(folder / "files"):
        checksum = path.with_name(f"{path.name}.sum")
        if not path.name.startswith(".") and (path.suffix != ".sum" or not _is(path.with_suffix(""))):
            paths = [each for each in (checksum, path) if _is(each)]
            yield _entry(FILE, folder, paths, path.name, _stat(path).st_mtime, paths[:1])


def _work(folder: Path) -> Iterator[Entry]:
    """What is being written, or was when a process died."""
    for path in _paths(folder / "tmp"):
        yield _entry(WORK, folder, [path])
    for name in ("programs", "kernels", "batches", "trials", "files"):
        for path in _paths(folder / name):
            if path.name.startswith("."):
                yield _entry(WORK, folder, [path])


def _entry(
    kind: str,
    folder: Path,
    paths: Sequence[Path],
    name: str = "",
    made: float | None = None,
    uses: Sequence[Path] = (),
    about: Mapping[str, Any] | None = None,
) -> Entry:
    """uses: the files whose mtimes say when it was used."""
    used = max((_stat(path).st_mtime for path in uses or paths), default=0.0)
    nbytes = sum(map(_size, paths))
    made = float(made) if isinstance(made, int | float) else used
    return Entry(kind, folder, name or paths[0].name, tuple(paths), nbytes, made, used, about or {})


# --------------------------------------------------------------------------------------------- checking


def problem(entry: Entry) -> str:
    """What is wrong with an entry, all of which is read; empty if nothing is."""
    if entry.kind == STRANGE:
        return "nothing of the store's has such a name"
    if entry.kind == WORK:
        left = age(entry.paths[0]) > STALE_S
        return "it is half-written: the process that wrote it has died" if left else ""
    refused = next(filter(None, map(_distrust, entry.paths)), "")
    try:
        return refused or _PROBLEMS[entry.kind](entry)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def problems(folder: Path) -> list[tuple[Entry, str]]:
    """The entries under a key, each with what is wrong with it.

    What is wrong is looked at again: another process may have been putting it there, or removing it.
    """
    found = [(entry, problem(entry)) for entry in contents(folder)]
    bad = {(entry.kind, entry.name) for entry, why in found if why}
    if not bad:
        return found
    again = [(entry, problem(entry)) for entry in contents(folder) if (entry.kind, entry.name) in bad]
    return [each for each in found if not each[1]] + again


def _distrust(path: Path) -> str:
    status = _stat(path)
    if stat.S_ISLNK(status.st_mode):
        return f"{path.name} is a link"
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is gone, or no file"
    why = distrust(status)
    return why and f"{path.name} {why}"


def _program_problem(entry: Entry) -> str:
    found = read_program(entry.paths[0])
    return found if isinstance(found, str) else ""


def _kernels_problem(entry: Entry) -> str:
    library = next((path for path in entry.paths if path.suffix == ".so" and path.parent.name == "batches"), None)
    kernels = [path for path in entry.paths if path.parent.name == "kernels"]
    for path in kernels:
        said = kernel_note(path)
        if not all(isinstance(said.get(name), str) for name in ("library", "sum", "text")):
            return f"{path.name} is damaged: it does not say where the kernel is"
        if library is None:
            return f"its library {said['library']} is gone"
        if said["sum"] != checksum_of(library):
            return f"{library.name} is damaged: its checksum is another than {path.name} says"
    return "" if library else "its library is gone"


def _trial_problem(entry: Entry) -> str:
    return "" if parse(first_line(entry.paths[0])) else f"{entry.name} is damaged"


def _file_problem(entry: Entry) -> str:
    checksum, *rest = entry.paths
    if not rest:
        return "it has no checksum" if checksum.suffix != ".sum" else "the file of this checksum is gone"
    return "" if checksum.read_text(errors="replace") == checksum_of(rest[0]) else f"{entry.name} is damaged"


_PROBLEMS = {PROGRAM: _program_problem, KERNELS: _kernels_problem, TRIAL: _trial_problem, FILE: _file_problem}


# --------------------------------------------------------------------------------------------- removing


def trim(
    root: Path, unused_s: float | None = None, nbytes: int | None = None, remove: Callable[[Entry], None] | None = None
) -> list[Entry]:
    """Remove what nobody has used for so many seconds, then the least recently used until `nbytes` are left.

    Other processes may be at work: what they have loaded stays loaded, what they look for is missing and built again.
    Headers, runtimes and object files that were used within the hour stay, as a compiler may be reading them, and so
    does what is no part of the store. What processes that died have left goes always, and so do libraries that no
    kernel names.
    remove: what to do instead. Returns what went.
    """
    folders = key_folders(root)
    entries = sorted((entry for folder in folders for entry in contents(folder)), key=lambda entry: entry.used)
    left, gone = sum(entry.nbytes for entry in entries), list[Entry]()
    for entry in entries:
        unused = unused_s is not None and age_of(entry) > unused_s
        left_over = entry.kind == WORK or (is_orphan(entry) and age_of(entry) > STALE_S)
        if _may_go(entry) and (left_over or unused or (nbytes is not None and left > nbytes)):
            (remove or discard)(entry)
            left -= entry.nbytes
            gone.append(entry)
    for folder in folders if remove is None else ():
        if age(folder) > _IN_USE_S and not contents(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return gone


def is_orphan(entry: Entry) -> bool:
    """Whether it is a library that no kernel names: another one has the same kernels since."""
    return entry.kind == KERNELS and not entry.about["kernels"]


def _may_go(entry: Entry) -> bool:
    least = {WORK: STALE_S, FILE: _IN_USE_S, STRANGE: float("inf")}.get(entry.kind, -1.0)
    return age_of(entry) > least


def age_of(entry: Entry) -> float:
    """Seconds since it was used."""
    return time.time() - entry.used


def discard(entry: Entry) -> None:
    """Remove an entry: first what it is found by, so that nobody finds the rest. Raises StoreError if it cannot be."""
    for path in entry.paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be removed: {error.strerror}", hint="whoever owns the store can trim it"
            ) from error


# ----------------------------------------------------------------------------------------------- private


def _paths(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _stat(path: Path) -> os.stat_result:
    """Of the file itself, also of a link; zeros where it has gone meanwhile."""
    try:
        return path.lstat()
    except OSError:
        return os.stat_result((0,) * 10)


def _is(path: Path) -> bool:
    return _stat(path).st_mode != 0


def _size(path: Path) -> int:
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    return _stat(path).st_size + sum(_stat(each).st_size for each in inside)


def kernel_note(path: Path) -> dict[str, Any]:
    """What a file of `kernels/` says; nothing if it is damaged."""
    return json_object(first_line(path))
