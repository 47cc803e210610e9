"""The store of built kernels: on disk, shared by all models and processes of a user.

    <root>/<key>/               one toolchain and header; the key is a hash of both
        kernels/<name>          one line of JSON: the batch that has the kernel, the batch's checksum, the text's hash
        batches/<id>.so .cpp    several kernels in one library, and their source for people to read
        files/<name>            precompiled header, runtime and the like, each with <name>.sum, its checksum
        programs/<key>-<sum>    a compiled graph (see `pellucid.reuse`), after one line of JSON: the checksum, when and
                                from what it was compiled
        trials/<key>            which variant of a kernel is the fastest here, see `trials.py`
        locks/  tmp/            one lock per batch being built; work in progress

Files are written by `os.replace`, so readers see complete files only; a file that a crash or a full disk left partial
fails its checksum and is built again. The store contains code, so only files are used that this user or root owns and
that no other user can write: a store that root has put into a container image is as safe as /usr/lib.
The mtime of `kernels/<name>`, `<name>.sum` or the entry is when a kernel, file, program or trial was last used.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from pellucid.errors import StoreError, warn

POLL_S = 0.02
"""Seconds between two attempts to take a lock."""

STALE_S = 24 * 3600
"""Seconds after which work in progress is assumed to be left by a process that died."""

_PATIENCE_S = 900
_HEADER = 1 << 16  # bytes of a first line that are read
_USE_INTERVAL_S = 60  # resolution of the time of the last use
_UNUSED_S = 30 * 24 * 3600
_SPILL_ERRORS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})


def default_root() -> Path:
    """`$PELLUCID_CACHE_DIR`, `$XDG_CACHE_HOME/pellucid` or `~/.cache/pellucid`."""
    if named := os.environ.get("PELLUCID_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):
        home = Path(base) if base else Path.home() / ".cache"
        if home.is_absolute():
            return home / "pellucid"
    # No home directory: a well-known name is safe, because its owner is checked.
    return Path(tempfile.gettempdir()) / f"pellucid-{os.geteuid()}"


@lru_cache(maxsize=1)
def _temporary_root() -> Path:
    """A private directory, for the life of this process, when the real one cannot be used."""
    root, owner = Path(tempfile.mkdtemp(prefix="pellucid-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not remove its parent's
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root


def text_hash(text: str) -> str:
    """A hash of a kernel's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class KernelStore:
    """The kernels built under one key.

    root: directory of the store, default `default_root()`. If the default cannot be used, a private temporary
    directory replaces it, with a warning; an explicit `root`, here or by `PELLUCID_CACHE_DIR`, that is unsafe raises
    StoreError. A store that can be read but not written (read-only, full) is read, and new kernels go to the temporary
    directory, with a warning.
    """

    def __init__(self, key: str, root: Path | None = None) -> None:
        self.key = key
        explicit = root is not None or "PELLUCID_CACHE_DIR" in os.environ
        self.root = _resolved(root or default_root())
        self._verified: dict[Path, str] = {}
        self._spilled = False
        try:
            self._open(self.root)
        except StoreError as error:
            if explicit:
                raise
            self._spill(error.message)
        except OSError as error:
            if not explicit or error.errno in _SPILL_ERRORS:
                self._spill(f"{self.root} cannot be used: {error.strerror}")
            else:
                raise StoreError(
                    f"the kernel store {self.root} cannot be used: {error}",
                    hint="set PELLUCID_CACHE_DIR to a directory of yours",
                ) from error

    @property
    def directory(self) -> Path:
        """The directory for new entries."""
        return (_temporary_root() if self._spilled else self.root) / self.key

    def find(self, kernels: Mapping[str, str]) -> dict[str, Path]:
        """The library of each kernel that the store has, intact and built from exactly this text.

        kernels: text by name. Damaged ones count as missing.
        """
        found = {}
        for name, text in kernels.items():
            for directory in self._directories():
                path = self._lookup(directory, name, text_hash(text))
                if path:
                    found[name] = path
                    break
        return found

    def holds(self, name: str, digest: str) -> bool:
        """Whether the store has the kernel of that name whose text has the hash `digest`."""
        return any(self._lookup(directory, name, digest) for directory in self._directories())

    def add(self, kernels: Mapping[str, str], library: Path, source: str) -> Path:
        """Move a library of `kernels` (text by name), built from `source`, into the store; returns its new path.

        library: a file in a directory of `workspace`.
        """
        directory = self.directory
        try:
            checksum = checksum_of(library)
            # A loaded file must keep its name and content: the dynamic linker identifies libraries by their names.
            target = directory / "batches" / f"{batch_id(kernels)}-{checksum[:8]}.so"
            write_whole(target.with_suffix(".cpp"), source.encode())
            move_whole(library, target)
            for name, text in kernels.items():
                entry = {"library": target.name, "sum": checksum, "text": text_hash(text)}
                write_whole(directory / "kernels" / name, json.dumps(entry).encode())
        except OSError as error:
            self._fail(error, directory)
            return self.add(kernels, library, source)
        self._verified[target] = checksum
        return target

    def file(self, name: str) -> Path | None:
        """The auxiliary file of that name, if it exists and is intact."""
        for directory in self._directories():
            path = directory / "files" / name
            expected = _read(path.with_name(f"{name}.sum")).decode(errors="replace")
            if expected and self._intact(path, expected):
                _note_use(path.with_name(f"{name}.sum"))
                return path
        return None

    def add_file(self, name: str, source: Path) -> Path:
        """Move an auxiliary file from a directory of `workspace` into the store."""
        directory = self.directory
        target = directory / "files" / name
        try:
            checksum = checksum_of(source)
            move_whole(source, target)
            write_whole(target.with_name(f"{name}.sum"), checksum.encode())
        except OSError as error:
            self._fail(error, directory)
            return self.add_file(name, source)
        self._verified[target] = checksum
        return target

    def programs(self, key: str) -> Iterator[bytes | str]:
        """The data of `add_program` for `key`, latest first; for an entry that is not trusted or not intact: why.

        It will be unpickled, which runs code: so nothing is read that another user could have written.
        """
        for directory in self._directories():
            found = [path for path in (directory / "programs").glob(f"{key}-*") if path.suffix == ""]
            for path in sorted(found, key=age):
                yield read_program(path)
                _note_use(path)

    def headers(self) -> Iterator[dict[str, Any]]:
        """The header of each program, see `add_program`."""
        for directory in self._directories():
            for path in (directory / "programs").glob("[!.]*"):
                yield header_of(path)

    def add_program(self, key: str, data: bytes, about: Mapping[str, Any]) -> None:
        """Store a compiled graph, if there is space; removes programs that were not used for a month.

        about: facts about its origin, as JSON types, for people.
        """
        programs, checksum = self.directory / "programs", hashlib.sha256(data).hexdigest()
        header = json.dumps({"sum": checksum, "bytes": len(data), "made": round(time.time()), **about})
        with contextlib.suppress(OSError):  # the next process compiles it again
            programs.mkdir(mode=0o700, exist_ok=True)
            for path in programs.iterdir():
                if age(path) > _UNUSED_S:
                    path.unlink(missing_ok=True)
            write_whole(programs / f"{key}-{checksum[:16]}", b"%s\n%s" % (header.encode(), data))

    def trials(self, key: str) -> Iterator[bytes]:
        """The data of `add_trial` for `key`; nothing that another user could have written."""
        for directory in self._directories():
            path = directory / "trials" / key
            if is_ours(path):
                yield _read(path)
                _note_use(path)

    def add_trial(self, key: str, data: bytes) -> None:
        """Store the result of a trial, if there is space."""
        trials = self.directory / "trials"
        with contextlib.suppress(OSError):  # the next process repeats the trial
            trials.mkdir(mode=0o700, exist_ok=True)
            write_whole(trials / key, data)

    def forget(self, path: Path) -> None:
        """Remove a file that is intact but cannot be loaded."""
        self._verified.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A temporary directory on the file system of the store, removed at the end with its contents."""
        path = None
        while path is None:
            directory = self.directory
            try:
                path = Path(tempfile.mkdtemp(dir=directory / "tmp"))
            except OSError as error:
                self._fail(error, directory)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock of that name against other threads and processes; no effect if files cannot be locked.

        It only avoids duplicate work: two processes that build the same kernels get correct results. So a process that
        has waited for long, perhaps for one that hangs, continues without it.
        """
        started = time.monotonic()
        while (held := self.try_lock(name)) is None and time.monotonic() - started < _PATIENCE_S:
            time.sleep(POLL_S)
        with held or contextlib.nullcontext():
            yield

    def try_lock(self, name: str) -> contextlib.AbstractContextManager[None] | None:
        """The lock of that name, as a context manager; None if another one holds it."""
        try:
            handle = open(self.directory / "locks" / name, "w")  # noqa: SIM115 (closed by _held)
        except OSError:
            return contextlib.nullcontext()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            return None if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else contextlib.nullcontext()
        return _held(handle)

    def out_of_space(self, directory: Path) -> None:
        """Report that the disk of `directory` (a value of the property of that name) is full.

        Later entries go to the temporary directory; raises StoreError if that is the full one.
        """
        self._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), directory)

    # ------------------------------------------------------------------------------------------- private

    def _open(self, root: Path) -> None:
        """Create the directories, and refuse those to which other users can write."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_parents(root)
        check_safe(root)
        if not (root / self.key).exists():
            _remove_unused(root)
        (root / self.key).mkdir(mode=0o700, exist_ok=True)
        check_safe(root / self.key)
        with contextlib.suppress(OSError):
            os.utime(root / self.key)  # keeps the key from being removed as unused
        for name in ("kernels", "batches", "files", "locks", "tmp"):
            directory = root / self.key / name
            directory.mkdir(mode=0o700, exist_ok=True)
            check_safe(directory)
        _remove_stale(root / self.key / "tmp")

    def _spill(self, why: str) -> None:
        """Store later entries in the temporary directory."""
        try:
            root = _temporary_root()
            self._open(root)
        except OSError as error:
            raise StoreError(
                f"kernels cannot be stored: {why}; nor in a temporary directory: {error.strerror}",
                hint="free some space, or set PELLUCID_CACHE_DIR or TMPDIR to a directory that can be written",
            ) from error
        self._spilled = True
        warn(
            f"Pellucid stores the kernels that it builds in {root}, for this process only: {why}. "
            "Set PELLUCID_CACHE_DIR to a directory of yours that can be written."
        )

    def _fail(self, error: OSError, directory: Path) -> None:
        """Handle a failed write in `directory`: use the temporary directory, or raise if it failed there."""
        if directory != self.directory:  # another thread has handled it
            return
        if not directory.is_dir():  # the store was removed
            try:
                return self._open(_temporary_root() if self._spilled else self.root)
            except OSError as why:
                error = why
        if self._spilled:
            raise StoreError(
                f"cannot write to the kernel store {self.directory}: {error.strerror}",
                hint="free some space, or set PELLUCID_CACHE_DIR or TMPDIR to a directory that can be written",
            ) from error
        self._spill(f"{self.directory} cannot be written: {error.strerror or error}")

    def _directories(self) -> tuple[Path, ...]:
        own = self.directory
        return (own, self.root / self.key) if self._spilled and self._readable() else (own,)

    def _readable(self) -> bool:
        """Whether the regular root, which could not be written, can be trusted for reading."""
        try:
            for directory in (self.root, self.root / self.key):
                check_safe(directory)
        except (OSError, StoreError):
            return False
        return True

    def _lookup(self, directory: Path, name: str, digest: str) -> Path | None:
        try:
            entry = json.loads(_read(directory / "kernels" / name))
            library, checksum, text = str(entry["library"]), str(entry["sum"]), entry["text"]
        except (ValueError, KeyError, TypeError):
            return None
        path = directory / "batches" / Path(library).name
        if text != digest or not self._intact(path, checksum):
            return None
        _note_use(directory / "kernels" / name)
        return path

    def _intact(self, path: Path, checksum: str) -> bool:
        if self._verified.get(path) == checksum:
            return path.exists()
        try:
            good = is_trusted(path.stat()) and checksum_of(path) == checksum
        except OSError:
            return False
        if good:
            self._verified[path] = checksum
        return good


@contextlib.contextmanager
def _held(handle: IO[str]) -> Iterator[None]:
    with handle:
        try:
            yield
        finally:  # closing is not enough: a child that was forked meanwhile has the file open too
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)


def batch_id(kernels: Mapping[str, str]) -> str:
    """Name of the batch of exactly these kernels (text by name)."""
    parts = sorted(f"{name}:{text_hash(text)}" for name, text in kernels.items())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _resolved(root: Path) -> Path:
    """The absolute path, so that later changes of links and of the current directory do not affect it."""
    try:
        return Path(os.path.realpath(root))
    except OSError as error:
        raise StoreError(
            f"the kernel store {root} cannot be found: {error.strerror}", hint="set PELLUCID_CACHE_DIR to a full path"
        ) from error


def is_owner(status: os.stat_result) -> bool:
    """Whether the owner is this user or root, who is trusted anyway."""
    return status.st_uid in (os.geteuid(), 0)


def is_trusted(status: os.stat_result) -> bool:
    """Whether only this user and root could have written it."""
    return is_owner(status) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_ours(path: Path) -> bool:
    """Whether it is a regular file that only this user and root could have written, in such a directory."""
    try:
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and is_trusted(status) and is_trusted(path.parent.stat())
    except OSError:
        return False


def distrust(status: os.stat_result) -> str:
    """Why it is not trusted; empty if only this user and root could have written it."""
    if is_trusted(status):
        return ""
    return "can be written by other users" if is_owner(status) else f"belongs to another user (uid {status.st_uid})"


def check_safe(directory: Path) -> None:
    """Refuse a directory to which other users can write. Raises StoreError."""
    status = directory.stat()
    why = distrust(status)
    if not why:
        return
    hint = f"chmod go-w {directory}" if is_owner(status) else "set PELLUCID_CACHE_DIR to a directory of yours"
    raise StoreError(f"the kernel store {directory} {why}, so code in it cannot be trusted", hint=hint)


def check_parents(root: Path) -> None:
    """Refuse a path of which another user could replace a directory."""
    for parent in root.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise StoreError(
                f"the kernel store {root} can be replaced by other users, who can write to {parent}",
                hint=f"chmod o-w {parent}, or set PELLUCID_CACHE_DIR to a directory that only you can reach",
            )


def key_folders(root: Path) -> list[Path]:
    """The directories of a store, one for each key; none if there is no store yet. Raises StoreError."""
    try:
        return [path for path in root.iterdir() if (path / "kernels").is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(
            f"the kernel store {root} cannot be read: {error.strerror}",
            hint="set PELLUCID_CACHE_DIR to a directory of yours",
        ) from error


def _remove_stale(tmp: Path) -> None:
    """Remove the remains of builds that died."""
    with contextlib.suppress(OSError):
        for path in tmp.iterdir():
            if age(path) > STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _remove_unused(root: Path) -> None:
    """Remove keys that were not opened for a month, of former compilers and releases."""
    with contextlib.suppress(StoreError):
        for path in key_folders(root):
            if age(path) > _UNUSED_S:
                shutil.rmtree(path, ignore_errors=True)


def checksum_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def age(path: Path) -> float:
    """Seconds since the last recorded use of a file; infinite if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def read_program(path: Path) -> bytes | str:
    """The data of a file of `programs/`, or why it is not trusted or not intact."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if not (is_trusted(path.parent.stat()) and is_trusted(os.fstat(file.fileno()))):
                return "the program in the store could have been written by another user"
            header, _, data = file.read().partition(b"\n")
    except OSError as error:
        return f"the program in the store cannot be read: {error.strerror}"
    about = _as_header(header)
    if len(data) < about.get("bytes", 0):
        return f"the program in the store is damaged: it has {len(data)} of {about['bytes']} bytes"
    if hashlib.sha256(data).hexdigest() != about.get("sum"):
        return "the program in the store is damaged"
    return data


def header_of(path: Path) -> dict[str, Any]:
    """The header of a program; empty if it is damaged, or no file."""
    return _as_header(first_line(path))


def first_line(path: Path) -> bytes:
    """The first line of a file; empty for anything but a regular file, such as a link or a pipe."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.readline(_HEADER) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return b""


def json_object(text: bytes) -> dict[str, Any]:
    """An object in JSON; empty if it is damaged."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _as_header(line: bytes) -> dict[str, Any]:
    """The header in the first line of a program; empty if it is damaged."""
    about = json_object(line)
    return about if isinstance(about.get("bytes"), int) else {}


def _note_use(path: Path) -> None:
    """Record the time of use as the mtime of a file; not at each use, to save disk writes."""
    if age(path) > _USE_INTERVAL_S:
        with contextlib.suppress(OSError):
            os.utime(path)


def move_whole(source: Path, target: Path) -> None:
    """Move a file into the store atomically, with permissions that the store trusts."""
    source.chmod(0o700)
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        write_whole(target, source.read_bytes())
        target.chmod(0o700)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
