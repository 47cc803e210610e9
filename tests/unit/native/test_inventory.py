"""What lies in a store: each kind of damage is told, and trimming takes what was used least recently."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pellucid.errors import StoreError
from pellucid.native.inventory import FILE, KERNELS, PROGRAM, STRANGE, TRIAL, WORK, Entry, contents, problem, trim
from pellucid.native.store import KernelStore

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """With a program, two libraries, of which one holds two kernels, and an auxiliary file."""
    store = KernelStore("key", tmp_path / "store")
    add_library(store, {"k1": "text one", "k2": "text two"})
    add_library(store, {"k3": "text three"}, b"another library")
    with store.workspace() as work:
        (work / "made").write_bytes(b"header")
        store.add_file("prelude.h", work / "made")
    store.add_program("a" * 40, b"pickled", {"line": "model.py:12", "graphs": [], "threads": 2})
    store.add_trial("b" * 40, b'{"kernels": ["k3", "k4"], "fastest": "k4", "ns": [20, 10], "pairs": 3}')
    return store


def add_library(store: KernelStore, kernels: dict[str, str], content: bytes = b"library") -> Path:
    with store.workspace() as work:
        (work / "k.so").write_bytes(content)
        return store.add(kernels, work / "k.so", "// source")


def entry(store: KernelStore, kind: str) -> Entry:
    return next(each for each in contents(store.directory) if each.kind == kind)


def kinds(store: KernelStore) -> list[str]:
    return [each.kind for each in contents(store.directory)]


def unused_for(hours: float, *paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - hours * HOUR,) * 2)


def kernel_entry(store: KernelStore, name: str) -> Entry:
    return next(each for each in contents(store.directory) if name in each.about.get("kernels", ()))


def test_entries_have_names_sizes_and_times(store: KernelStore) -> None:
    assert sorted(kinds(store)) == [FILE, KERNELS, KERNELS, PROGRAM, TRIAL]
    assert entry(store, TRIAL).about == {"kernels": ["k3", "k4"], "fastest": "k4", "ns": [20, 10]}
    program = entry(store, PROGRAM)
    assert program.about == {"line": "model.py:12", "graphs": [], "threads": 2}
    assert program.nbytes == program.paths[0].stat().st_size and abs(program.made - time.time()) < 60
    unused_for(5, store.directory / "kernels" / "k1", *(store.directory / "batches").iterdir())
    both = kernel_entry(store, "k1")
    assert both.about["kernels"] == ["k1", "k2"] and len(both.paths) == 4
    assert time.time() - both.made > 4 * HOUR and time.time() - both.used < 60
    assert not any(map(problem, contents(store.directory)))


def test_use_is_noted(store: KernelStore) -> None:
    paths = [store.directory / "kernels" / "k1", store.directory / "files" / "prelude.h.sum"]
    paths += entry(store, PROGRAM).paths + entry(store, TRIAL).paths
    unused_for(5, *paths)
    assert "k1" in store.find({"k1": "text one"})
    assert store.file("prelude.h") is not None
    assert list(store.programs("a" * 40)) == [b"pickled"]
    assert len(list(store.trials("b" * 40))) == 1
    assert all(time.time() - path.stat().st_mtime < 60 for path in paths)


def test_checking_is_no_use(store: KernelStore) -> None:
    unused_for(5, *(path for each in contents(store.directory) for path in each.paths))
    assert not any(map(problem, contents(store.directory)))
    assert all(time.time() - each.used > 4 * HOUR for each in contents(store.directory))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)


def link(path: Path) -> None:
    moved = path.rename(path.parent.parent.parent.parent / "elsewhere")
    path.symlink_to(moved)


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00{")


DAMAGES: list[tuple[str, str, Callable[[Path], object], str]] = [
    (PROGRAM, "programs/*", cut, "has 4 of 7 bytes"),
    (PROGRAM, "programs/*", flip, "is damaged"),
    (PROGRAM, "programs/*", garbage, "is damaged"),
    (PROGRAM, "programs/*", lambda path: path.write_bytes(b""), "is damaged"),
    (PROGRAM, "programs/*", link, "is a link"),
    (PROGRAM, "programs/*", lambda path: path.chmod(0o666), "can be written by other users"),
    (PROGRAM, "programs/*", lambda path: os.chown(path, 12345, -1), "belongs to another user (uid 12345)"),
    (KERNELS, "batches/*.so", cut, "its checksum is another than"),
    (KERNELS, "batches/*.so", flip, "its checksum is another than"),
    (KERNELS, "batches/*.so", link, "is a link"),
    (KERNELS, "batches/*.so", lambda path: path.chmod(0o777), "can be written by other users"),
    (KERNELS, "batches/*.so", lambda path: os.chown(path, 12345, -1), "belongs to another user"),
    (KERNELS, "batches/*.so", Path.unlink, "its library"),
    (KERNELS, "kernels/k1", garbage, "does not say where the kernel is"),
    (KERNELS, "kernels/k1", lambda path: path.write_text("[]"), "does not say where the kernel is"),
    (KERNELS, "kernels/k1", lambda path: path.chmod(0o666), "can be written by other users"),
    (TRIAL, "trials/*", cut, "is damaged"),
    (TRIAL, "trials/*", garbage, "is damaged"),
    (TRIAL, "trials/*", link, "is a link"),
    (TRIAL, "trials/*", lambda path: path.chmod(0o666), "can be written by other users"),
    (FILE, "files/prelude.h", flip, "prelude.h is damaged"),
    (FILE, "files/prelude.h", Path.unlink, "the file of this checksum is gone"),
    (FILE, "files/prelude.h.sum", Path.unlink, "it has no checksum"),
    (FILE, "files/prelude.h.sum", garbage, "prelude.h is damaged"),
]


@pytest.mark.parametrize(("kind", "where", "spoil", "reason"), DAMAGES)
def test_what_is_wrong_is_told(store: KernelStore, kind: str, where: str, spoil, reason: str) -> None:
    if "chown" in getattr(getattr(spoil, "__code__", None), "co_names", ()) and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for path in sorted(store.directory.glob(where))[:1]:
        spoil(path)
    bad = [(each, why) for each in contents(store.directory) if (why := problem(each))]
    assert [each.kind for each, _ in bad] == [kind] and reason in bad[0][1]


def test_half_written_files_are_bad_once_nobody_writes_them(store: KernelStore) -> None:
    (store.directory / "tmp" / "tmpabc").mkdir()
    for name in ("programs/.x.1.2", "kernels/.k.1.2", "batches/.b.so.1.2"):
        (store.directory / name).write_bytes(b"half")
    work = [each for each in contents(store.directory) if each.kind == WORK]
    assert len(work) == 4 and not any(map(problem, work))
    unused_for(30, *(path for each in work for path in each.paths))
    for each in (each for each in contents(store.directory) if each.kind == WORK):
        assert "half-written" in problem(each)
    assert {each.kind for each in trim(store.root, nbytes=1 << 40)} == {WORK}
    assert WORK not in kinds(store) and not (store.directory / "tmp" / "tmpabc").exists()


def test_what_is_not_the_stores_is_told_and_stays(store: KernelStore) -> None:
    (store.directory / "thesis.txt").write_text("years of work")
    assert "nothing of the store's" in problem(entry(store, STRANGE))
    trim(store.root, 0, 0)
    assert (store.directory / "thesis.txt").exists()


def test_a_file_that_is_no_file_is_not_read(store: KernelStore) -> None:
    """Neither waits for a writer."""
    for name in (f"programs/{'b' * 40}-{'0' * 16}", "kernels/pipe"):
        os.mkfifo(store.directory / name)
    told = [problem(each) for each in contents(store.directory)]
    assert sum("no file" in why for why in told) == 2


# -------------------------------------------------------------------------------------------- trimming


def test_what_was_not_used_for_long_goes(store: KernelStore) -> None:
    unused_for(48, store.directory / "kernels" / "k3", *entry(store, PROGRAM).paths)
    gone = trim(store.root, 24 * HOUR)
    assert sorted(each.kind for each in gone) == [KERNELS, PROGRAM]
    assert store.find({"k1": "text one", "k3": "text three"}).keys() == {"k1"}
    assert not list((store.directory / "programs").iterdir())
    assert sorted(path.suffix for path in (store.directory / "batches").iterdir()) == [".cpp", ".so"]


def test_the_least_recently_used_goes_first(store: KernelStore) -> None:
    unused_for(3, *entry(store, PROGRAM).paths)
    unused_for(2, store.directory / "kernels" / "k3")
    unused_for(1, store.directory / "kernels" / "k1", store.directory / "kernels" / "k2")
    total = sum(each.nbytes for each in contents(store.directory))
    assert trim(store.root, nbytes=total) == []
    (first,) = trim(store.root, nbytes=total - 1)
    assert first.kind == PROGRAM
    (second,) = trim(store.root, nbytes=total - first.nbytes - 1)
    assert second.about["kernels"] == ["k3"]


def test_headers_in_use_stay(store: KernelStore) -> None:
    trim(store.root, 0, 0)
    assert kinds(store) == [FILE]
    unused_for(2, store.directory / "files" / "prelude.h.sum")
    trim(store.root, 0, 0)
    assert kinds(store) == [] and store.directory.exists()
    unused_for(2, store.directory)
    trim(store.root, 0, 0)
    assert not store.directory.exists()


def test_what_cannot_be_removed_is_an_error(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreError, match="cannot be removed: Permission denied"):
        trim(store.root, 0)


def test_what_would_go_is_only_told(store: KernelStore) -> None:
    gone = trim(store.root, 0, 0, lambda _: None)
    assert len(gone) == 4 and len(kinds(store)) == 5


def test_a_library_that_no_kernel_names_goes_after_a_day(store: KernelStore) -> None:
    add_library(store, {"k3": "another text"}, b"a third library")
    orphan = next(each for each in contents(store.directory) if each.about.get("kernels") == [])
    assert problem(orphan) == "" and trim(store.root, nbytes=1 << 40) == []
    unused_for(30, *orphan.paths)
    assert [each.name for each in trim(store.root, nbytes=1 << 40)] == [orphan.name]


def test_all_keys_are_trimmed(store: KernelStore) -> None:
    other = KernelStore("other", store.root)
    add_library(other, {"k": "text"})
    trim(store.root, 0)
    assert kinds(other) == []


def test_an_entry_of_json_that_is_no_header(store: KernelStore) -> None:
    path = store.directory / "programs" / f"{'c' * 40}-{'0' * 16}"
    for header in ("17", "[1]", json.dumps({"bytes": "many"}), "{" * 100_000):
        path.write_bytes(header.encode() + b"\nx")
        found = next(each for each in contents(store.directory) if each.paths == (path,))
        assert found.about == {} and "is damaged" in problem(found)
