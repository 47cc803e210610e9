"""What a store has for this machine as one file, and such a file put into another store.

A gzipped tar: first `pellucid.json`, which says what it was built for, then files under the names that they have in the
store, and at the end `files.json` with their checksums. Whoever imports an archive runs code from it: so nothing is
taken from a file that somebody else could have written, and nothing is put into the store before all of it was read.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pellucid.errors import StoreError, UserError
from pellucid.machine.model import from_text
from pellucid.native.inventory import FILE, KERNELS, PROGRAM, TRIAL, Entry, contents, is_orphan, kernel_note, problem
from pellucid.native.machine import machine_file
from pellucid.native.store import KernelStore, distrust, is_owner, move_whole, read_program, write_whole
from pellucid.native.toolchain import misfit, note_of, write_note
from pellucid.native.trials import parse

_VERSION = 1
_HEAD, _TAIL = "pellucid.json", "files.json"
_MOST = 64 << 20  # bytes of either
_CHUNK = 1 << 20
_KEY = re.compile(r"v1-[0-9a-f]{16}-[0-9a-f]{12}", re.ASCII)
_MEMBER = re.compile(
    r"programs/[0-9a-f]{40}-[0-9a-f]{16}|kernels/[A-Za-z_]\w*|batches/[0-9a-f]{24}-[0-9a-f]{8}\.(so|cpp)"
    r"|trials/[0-9a-f]{40}|files/\w[\w.+-]*",
    re.ASCII,
)
_MACHINE = re.compile(r"machine-[0-9a-f]{12}\.json", re.ASCII)

Stale = Callable[[Mapping[str, Any]], str]
"""Why nobody would find a program, from what the store says of it; empty if somebody may."""


@dataclass(frozen=True, slots=True)
class Moved:
    """moved: what was written to the archive, or put into the store. present: what the store had already.

    left_out: what was not, and why. notes: what else is to be known.
    """

    moved: tuple[Entry, ...]
    present: tuple[Entry, ...] = ()
    left_out: tuple[tuple[Entry, str], ...] = ()
    notes: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------------------- export


def export(folder: Path, file: Path, stale: Stale) -> Moved:
    """Write what lies under one key to an archive.

    Raises UserError where there is nothing to write, or no place to write it to.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        # Readable for others, as the umask has it, and writable for nobody else.
        with (
            open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as out,
            gzip.GzipFile(fileobj=out, mode="wb", filename="", compresslevel=6) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            found = _export(folder, tar, stale)
        if not any(entry.kind in (PROGRAM, KERNELS) for entry in found.moved):
            raise UserError(
                f"there is nothing to export: {folder} has no kernel", hint="run the program once, and then export"
            )
        os.replace(temporary, file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return found


def _export(folder: Path, tar: tarfile.TarFile, stale: Stale) -> Moved:
    moved: list[Entry] = []
    left_out: list[tuple[Entry, str]] = []
    checksums: dict[str, str] = {}
    _add(tar, _HEAD, _json(_about(folder)))
    for entry in contents(folder):
        if entry.kind not in (PROGRAM, KERNELS, TRIAL, FILE) or is_orphan(entry):
            continue
        why = problem(entry) or (stale(entry.about) if entry.kind == PROGRAM else "")
        files = {} if why else _read(entry)
        for name, data in files.items():
            checksums[name] = hashlib.sha256(data).hexdigest()
            _add(tar, name, data)
        if files:
            moved.append(entry)
        else:
            left_out.append((entry, why or "it was removed meanwhile"))
    _add(tar, _TAIL, _json(checksums))
    return Moved(tuple(moved), left_out=tuple(left_out))


def _about(folder: Path) -> dict[str, Any]:
    """What an archive begins with. The measurements of the machine are part of what decides how graphs are compiled."""
    machine = folder.parent / machine_file().name
    measured = {"name": machine.name, "text": machine.read_text()} if machine.exists() else None
    return {"version": _VERSION, "key": folder.name, "built_for": note_of(folder), "machine": measured}


def _read(entry: Entry) -> dict[str, bytes]:
    """The files of an entry, from their names in the archive; none if one has gone."""
    try:
        return {str(path.relative_to(entry.folder)): path.read_bytes() for path in entry.paths}
    except OSError:
        return {}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    tar.addfile(member, io.BytesIO(data))


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


# -------------------------------------------------------------------------------------------------- import


def install(file: Path, root: Path, stale: Stale) -> tuple[str, Moved]:
    """Put an archive into a store; the key under which it lies.

    Raises StoreError, with the store as it was, for one that cannot be used here.
    """
    with _opened(file) as handle:
        try:
            with tarfile.open(fileobj=handle, mode="r|gz") as tar:
                about = _head(tar)
                why = misfit(about["key"], about["built_for"])
                if why:
                    raise StoreError(
                        f"the archive {file} is not for this machine: {why}",
                        hint="export it where the processor, PyTorch, Pellucid and the compiler are as here",
                    )
                store = KernelStore(about["key"], root)
                if store.directory.parent != store.root:
                    raise StoreError(f"nothing can be imported: {root} cannot be written")
                with store.workspace() as work:
                    staged = _staged(tar, work / about["key"])
                    return store.key, _put(staged, store, about, stale)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise StoreError(f"the archive {file} is damaged, or not whole, or no archive: {error}") from error
        except _Refused as refused:
            raise StoreError(f"the archive {file} is refused: {refused}") from refused
        except OSError as error:
            raise StoreError(f"the archive {file} cannot be imported: {error.strerror or error}") from error


class _Refused(Exception):
    """An archive that is none, or was made to do harm: why."""


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """The archive, if nobody else could have written it."""
    try:
        handle = open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise StoreError(f"the archive {file} cannot be read: {error.strerror}") from error
    with handle:
        status = os.fstat(handle.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"the archive {file} is no file")
        why = distrust(status)
        if why:
            hint = f"chmod go-w {file}" if is_owner(status) else "make a copy that is yours, if you trust them"
            raise StoreError(f"the archive {file} {why}, so code in it cannot be trusted", hint=hint)
        yield handle


def _head(tar: tarfile.TarFile) -> dict[str, Any]:
    member = tar.next()
    if member is None or member.name != _HEAD:
        raise _Refused(f"it does not begin with {_HEAD}: `pellucid cache export` has not made it")
    about = _object(tar, member)
    if about.get("version") != _VERSION:
        raise _Refused("another version of Pellucid has made it")
    if not (_KEY.fullmatch(str(about.get("key"))) and isinstance(about.get("built_for"), dict)):
        raise _Refused("it does not say what it was built for")
    return about


def _staged(tar: tarfile.TarFile, folder: Path) -> list[Entry]:
    """The entries of an archive, unpacked into a directory and checked."""
    for name in ("programs", "kernels", "batches", "trials", "files"):
        (folder / name).mkdir(mode=0o700, parents=True)
    checksums: dict[str, str] = {}
    while (member := tar.next()) is not None and member.name != _TAIL:
        if not member.isreg():
            raise _Refused(f"{member.name!r} is a link, or no file")
        if not _MEMBER.fullmatch(member.name):
            raise _Refused(f"{member.name!r} is no name of a file in a store")
        if member.name in checksums:
            raise _Refused(f"{member.name!r} occurs twice")
        if member.size > shutil.disk_usage(folder).free:
            raise _Refused(f"{member.name!r} has {member.size} bytes, for which there is no room")
        checksums[member.name] = _unpack(tar, member, folder / member.name)
    if member is None or _object(tar, member) != checksums:
        raise _Refused("it is not whole, or was changed: its list of files says otherwise")
    staged = contents(folder)
    for entry in staged:
        why = problem(entry)
        if why:
            raise _Refused(f"{entry.kind} {entry.name}: {why}")
    return staged


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> str:
    """Write a file; its checksum."""
    source, digest = tar.extractfile(member), hashlib.sha256()
    assert source is not None  # it is a file
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as out:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _object(tar: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    """The JSON of a member."""
    source = tar.extractfile(member) if member.isreg() and member.size <= _MOST else None
    try:
        value = json.loads(source.read()) if source else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _Refused(f"{member.name} cannot be read")
    return value


def _put(staged: list[Entry], store: KernelStore, about: Mapping[str, Any], stale: Stale) -> Moved:
    """Move entries into the store, in an order in which nobody finds what is not there yet."""
    moved: list[Entry] = []
    present: list[Entry] = []
    left_out: list[tuple[Entry, str]] = []
    for name in ("programs", "trials"):
        (store.directory / name).mkdir(mode=0o700, exist_ok=True)
    write_note(store.directory, about["built_for"])
    for entry in sorted(staged, key=lambda entry: (FILE, KERNELS, TRIAL, PROGRAM).index(entry.kind)):
        why = stale(entry.about) if entry.kind == PROGRAM else ""
        missing = _missing(entry, store)
        if why:
            left_out.append((entry, why))
        elif not missing:
            present.append(entry)
        else:
            for path in missing:
                move_whole(path, store.directory / path.relative_to(entry.folder))
            moved.append(entry)
    return Moved(tuple(moved), tuple(present), tuple(left_out), tuple(_machine(about.get("machine"), store.root)))


def _missing(entry: Entry, store: KernelStore) -> list[Path]:
    """The files of an entry that the store lacks, those last by which the others are found."""
    if entry.kind == KERNELS:
        kernels = [path for path in entry.paths if path.parent.name == "kernels"]
        lacking = [path for path in kernels if not store.holds(path.name, kernel_note(path)["text"])]
        return [*(path for path in entry.paths if path not in kernels), *lacking] if lacking else []
    there = store.directory / entry.paths[-1].relative_to(entry.folder)
    if entry.kind == TRIAL:
        whole = any(parse(data) for data in store.trials(entry.name))
    else:
        whole = store.file(entry.name) is not None if entry.kind == FILE else isinstance(read_program(there), bytes)
    return [] if whole else list(reversed(entry.paths))


def _machine(given: Any, root: Path) -> Iterator[str]:
    """Keep the measurements of an archive if there are none for this machine; yields what is to be told of that."""
    if not isinstance(given, dict):
        return
    name, text = str(given.get("name")), str(given.get("text"))
    here = root / machine_file().name
    if not _MACHINE.fullmatch(name) or name != here.name:
        yield "the machine was measured with other cores or another PyTorch: its graphs will be compiled again"
        return
    try:
        from_text(text, name)
    except UserError as error:
        yield f"its measurements of the machine cannot be read: {error.message}"
        return
    if not here.exists():
        write_whole(here, text.encode())
    elif here.read_text() != text:
        yield "this machine was measured too, with other figures: graphs that depend on them will be compiled again"
