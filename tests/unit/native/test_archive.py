"""An archive of a store: what comes out is what went in, and nothing else is let in."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pellucid.errors import StoreError, UserError
from pellucid.native import archive, toolchain
from pellucid.native.archive import export, install
from pellucid.native.cpu import cpu
from pellucid.native.inventory import FILE, KERNELS, PROGRAM, TRIAL, contents, problem
from pellucid.native.sources import prelude_hash
from pellucid.native.store import KernelStore
from pellucid.native.toolchain import detect, misfit, note_of, remember

KERNEL_TEXTS = {"k1": "text one", "k2": "text two"}


def fresh(_about: Any) -> str:
    return ""


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Of this toolchain, with an entry of each kind."""
    store = KernelStore(f"v1-{detect().key}-{prelude_hash()}", tmp_path / "from")
    remember(detect(), store.directory)
    with store.workspace() as work:
        (work / "k.so").write_bytes(b"library")
        store.add(KERNEL_TEXTS, work / "k.so", "// source")
        (work / "made").write_bytes(b"header")
        store.add_file("prelude.h", work / "made")
    store.add_program("a" * 40, b"pickled", {"line": "model.py:12", "graphs": [], "threads": 2})
    store.add_trial("b" * 40, b'{"kernels": ["k1", "k2"], "fastest": "k2", "ns": [20, 10], "pairs": 3}')
    return store


@pytest.fixture
def file(store: KernelStore, tmp_path: Path) -> Path:
    file = tmp_path / "warm.tar.gz"
    found = export(store.directory, file, fresh)
    assert sorted(each.kind for each in found.moved) == [FILE, KERNELS, PROGRAM, TRIAL] and not found.left_out
    return file


def members(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]


def rewritten(file: Path, found: dict[str, Any]) -> Path:
    """An archive with these members: their data, or a header and data."""
    with tarfile.open(file, "w:gz") as tar:
        for name, data in found.items():
            member = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            if member is not data:
                member.size = len(data)
            tar.addfile(member, None if member is data else io.BytesIO(data))
    return file


def nothing_in(root: Path) -> bool:
    return not any(contents(folder) for folder in root.glob("v1-*"))


def test_what_is_imported_is_what_was_exported(store: KernelStore, file: Path, tmp_path: Path) -> None:
    key, found = install(file, tmp_path / "to", fresh)
    assert key == store.key and len(found.moved) == 4 and not found.present and not found.left_out
    other = KernelStore(key, tmp_path / "to")
    assert other.find(KERNEL_TEXTS).keys() == {"k1", "k2"}
    assert list(other.programs("a" * 40)) == [b"pickled"]
    assert list(other.trials("b" * 40)) == list(store.trials("b" * 40)) != []
    assert other.file("prelude.h").read_bytes() == b"header"  # type: ignore[union-attr]
    assert not any(map(problem, contents(other.directory))) and not list((other.directory / "tmp").iterdir())
    assert misfit(key, note_of(other.directory)) == ""
    assert all(path.stat().st_mode & 0o077 == 0 for each in contents(other.directory) for path in each.paths[:1])


def test_what_is_there_already_stays(store: KernelStore, file: Path, tmp_path: Path) -> None:
    install(file, tmp_path / "to", fresh)
    inodes = {path: path.stat().st_ino for path in (tmp_path / "to").rglob("*") if path.is_file()}
    _, found = install(file, tmp_path / "to", fresh)
    assert len(found.present) == 4 and not found.moved
    assert all(path.stat().st_ino == inode for path, inode in inodes.items() if path.name != "toolchain.json")


def test_a_kernel_that_is_missing_or_damaged_is_put_back(store: KernelStore, file: Path, tmp_path: Path) -> None:
    key, _ = install(file, tmp_path / "to", fresh)
    for damaged in (tmp_path / "to" / key / "batches").glob("*.so"):
        damaged.write_bytes(b"")
    (tmp_path / "to" / key / "kernels" / "k2").unlink()
    _, found = install(file, tmp_path / "to", fresh)
    assert [each.kind for each in found.moved] == [KERNELS]
    assert KernelStore(key, tmp_path / "to").find(KERNEL_TEXTS).keys() == {"k1", "k2"}


def test_bad_entries_are_not_exported(store: KernelStore, tmp_path: Path) -> None:
    (path,) = (store.directory / "programs").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    found = export(store.directory, tmp_path / "a.tar.gz", fresh)
    assert [(each.kind, "is damaged" in why) for each, why in found.left_out] == [(PROGRAM, True)]


def test_programs_that_nobody_finds_are_left_out(store: KernelStore, file: Path, tmp_path: Path) -> None:
    found = export(store.directory, tmp_path / "a.tar.gz", lambda _: "it is old")
    assert [(each.kind, why) for each, why in found.left_out] == [(PROGRAM, "it is old")]
    _, found = install(file, tmp_path / "to", lambda about: f"it begins at {about['line']}")
    assert [why for _, why in found.left_out] == ["it begins at model.py:12"]
    assert PROGRAM not in [each.kind for each in found.moved]


def test_an_empty_store_is_not_exported(tmp_path: Path) -> None:
    store = KernelStore("key", tmp_path / "from")
    with pytest.raises(UserError, match="nothing to export"):
        export(store.directory, tmp_path / "a.tar.gz", fresh)
    assert not list(tmp_path.glob("*a.tar.gz*"))


def test_nobody_else_can_write_an_archive_whatever_the_umask(store: KernelStore, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        export(store.directory, tmp_path / "a.tar.gz", fresh)
    finally:
        os.umask(before)
    install(tmp_path / "a.tar.gz", tmp_path / "to", fresh)


# --------------------------------------------------------------------------------------------- refused


def _link(found: dict[str, Any], kind: bytes) -> dict[str, Any]:
    member = tarfile.TarInfo("kernels/k1")
    member.type, member.linkname = kind, "/etc/passwd"
    return {name: member if name == "kernels/k1" else data for name, data in found.items()}


def _renamed(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: {name if each == "kernels/k1" else each: data for each, data in found.items()}


def _changed(name: str, data: bytes) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: {**found, next(each for each in found if each.startswith(name)): data}


def _listed(found: dict[str, Any], **changes: bytes) -> dict[str, Any]:
    """With other contents and a list of files that says so."""
    import hashlib

    changed = {name: changes.get(name.split("/")[0], data) for name, data in found.items()}
    sums = {each: hashlib.sha256(data).hexdigest() for each, data in changed.items() if "/" in each}
    return {**changed, "files.json": json.dumps(sums).encode()}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "symbolic link": (lambda found: _link(found, tarfile.SYMTYPE), "'kernels/k1' is a link"),
    "hard link": (lambda found: _link(found, tarfile.LNKTYPE), "'kernels/k1' is a link"),
    "device": (lambda found: _link(found, tarfile.CHRTYPE), "'kernels/k1' is a link, or no file"),
    "folder": (lambda found: _link(found, tarfile.DIRTYPE), "'kernels/k1' is a link, or no file"),
    "way up": (_renamed("kernels/../../../k1"), "is no name of a file"),
    "way up at once": (_renamed("../k1"), "is no name of a file"),
    "absolute": (_renamed("/tmp/k1"), "is no name of a file"),
    "hidden": (_renamed("files/.k1"), "is no name of a file"),
    "deeper": (_renamed("kernels/a/k1"), "is no name of a file"),
    "another folder": (_renamed("locks/k1"), "is no name of a file"),
    "note": (_renamed("toolchain.json"), "is no name of a file"),
    "no head": (lambda found: {each: found[each] for each in found if each != "pellucid.json"}, "does not begin with"),
    "no list": (lambda found: {each: found[each] for each in found if each != "files.json"}, "not whole"),
    "less than listed": (lambda found: {each: found[each] for each in found if each != "kernels/k1"}, "not whole"),
    "changed": (_changed("batches/", b"evil"), "not whole, or was changed"),
    "bad library": (lambda found: _listed(found, batches=b"evil"), "its checksum is another"),
    "bad program": (lambda found: _listed(found, programs=b"evil"), "is damaged"),
    "bad kernel": (lambda found: _listed(found, kernels=b"{}"), "does not say where the kernel is"),
    "head of garbage": (_changed("pellucid.json", b"{"), "cannot be read"),
    "list of garbage": (_changed("files.json", b"[" * 100_000), "cannot be read"),
    "no key": (_changed("pellucid.json", b'{"version": 1, "key": "../v1", "built_for": {}}'), "what it was built for"),
    "another version": (_changed("pellucid.json", b'{"version": 2}'), "another version of Pellucid"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_as_exported_is_refused_and_leaves_nothing(name: str, file: Path, tmp_path: Path) -> None:
    change, why = REFUSED[name]
    rewritten(file, change(members(file)))
    with pytest.raises(StoreError) as refused:
        install(file, tmp_path / "to", fresh)
    assert why in refused.value.message
    assert nothing_in(tmp_path / "to")


def test_a_file_that_occurs_twice_is_refused(file: Path, tmp_path: Path) -> None:
    found = members(file)
    twice = tarfile.TarInfo("kernels/k1")
    rewritten(file, {**{name: data for name, data in found.items() if name != "files.json"}, "again": twice})
    with pytest.raises(StoreError, match="occurs twice"):
        install(file, tmp_path / "to", fresh)
    assert nothing_in(tmp_path / "to")


@pytest.mark.parametrize("keep", [0, 20, 0.5, 0.97])
def test_a_truncated_archive_is_refused(keep: float, file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    with pytest.raises(StoreError, match=r"not whole|does not begin with"):
        install(file, tmp_path / "to", fresh)
    assert nothing_in(tmp_path / "to")


# Named, since compressed data has the time in it, and all processes of a test run must find the same tests.
@pytest.mark.parametrize(
    "data",
    [b"no archive", gzip.compress(b"no tar"), gzip.compress(b"\0" * 10240)],
    ids=["nothing", "compressed text", "zeros"],
)
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(StoreError, match=r"not whole|does not begin with"):
        install(tmp_path / "a", tmp_path / "to", fresh)


def test_an_archive_that_others_could_have_written_is_refused(file: Path, tmp_path: Path) -> None:
    file.chmod(0o664)
    with pytest.raises(StoreError, match="can be written by other users") as refused:
        install(file, tmp_path / "to", fresh)
    assert refused.value.hint == f"chmod go-w {file}"
    file.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        with pytest.raises(StoreError, match=r"belongs to another user \(uid 12345\)"):
            install(file, tmp_path / "to", fresh)
    assert not (tmp_path / "to").exists()


def test_a_pipe_or_a_folder_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing"):
        with pytest.raises(StoreError, match=r"is no file|cannot be read"):
            install(path, tmp_path / "to", fresh)


def test_a_store_that_others_can_write_takes_nothing(file: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to").chmod(0o777)
    with pytest.raises(StoreError, match="can be written by other users"):
        install(file, tmp_path / "to", fresh)


def test_nothing_is_unpickled(store: KernelStore, tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    store.add_program("b" * 40, pickle.dumps(Evil()), {})
    export(store.directory, tmp_path / "a.tar.gz", fresh)
    install(tmp_path / "a.tar.gz", tmp_path / "to", fresh)
    assert not any(map(problem, contents(tmp_path / "to" / store.key)))
    assert not marker.exists()


# -------------------------------------------------------------------------------------- another machine


def _set(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.setattr(toolchain, name, value)


ELSEWHERE: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "PyTorch": (lambda patch: patch.setattr("torch.__version__", "2.99.0"), "PyTorch: 2.13"),
    "processor": (lambda patch: _set(patch, "cpu", lambda: _cpu(name="Another CPU")), "here it is Another CPU"),
    "features": (lambda patch: _set(patch, "cpu", lambda: _cpu(without="fsgsbase")), "there with fsgsbase"),
    "flags": (lambda patch: patch.setenv("PELLUCID_CXXFLAGS", "-O1"), "here with -O1"),
    "capability": (lambda patch: patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2"), "AVX2"),
    "compiler": (lambda patch: _set(patch, "_identify", lambda *_: ("gcc", "99.1")), "here it is gcc 99.1"),
    "header": (lambda patch: _set(patch, "prelude_hash", lambda: "0" * 12), "with another header"),
}


def _cpu(name: str = "", without: str = "") -> Any:
    from dataclasses import replace

    return replace(cpu(), name=name or cpu().name, flags=cpu().flags - {without})


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    detect.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    detect.cache_clear()


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_was_built_for_another_machine_is_refused(
    what: str, file: Path, tmp_path: Path, elsewhere: pytest.MonkeyPatch
) -> None:
    change, why = ELSEWHERE[what]
    if (what == "features" and "fsgsbase" not in cpu().flags) or (what == "capability" and detect().isa == "AVX2"):
        pytest.skip("this processor has no such feature to lose")
    detect.cache_clear()
    change(elsewhere)
    with pytest.raises(StoreError, match="is not for this machine") as refused:
        install(file, tmp_path / "to", fresh)
    assert why in refused.value.message
    assert not (tmp_path / "to").exists()


def test_without_a_compiler_a_processor_with_more_features_will_do(
    file: Path, tmp_path: Path, elsewhere: pytest.MonkeyPatch
) -> None:
    """As `_recall` has it: what another machine has built runs here, if this one has all that it needs."""
    elsewhere.setenv("PATH", str(tmp_path))
    elsewhere.delenv("CXX", raising=False)
    here = _cpu("Another CPU")
    _set(elsewhere, "cpu", lambda: type(here)(**{**_fields(here), "flags": here.flags | {"more"}}))
    key, _ = install(file, tmp_path / "to", fresh)
    assert detect(tmp_path / "to").absent and f"v1-{detect(tmp_path / 'to').key}-{prelude_hash()}" == key
    detect.cache_clear()
    _set(elsewhere, "cpu", lambda: type(here)(**{**_fields(here), "flags": here.flags - {"avx2", "fpu"} | {"avx2"}}))
    with pytest.raises(StoreError, match="the processor lacks features of the one that it was built on: fpu"):
        install(file, tmp_path / "other", fresh)


def _fields(found: Any) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


def test_a_note_that_does_not_yield_its_name_is_told(store: KernelStore) -> None:
    note = note_of(store.directory)
    assert misfit(store.key, note) == ""
    assert "does not yield its name" in misfit(store.key, {**note, "version": "1"})
    assert misfit(store.key, {}) == "nothing says what it was built for"


def test_measurements_of_the_machine_are_carried(
    store: KernelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pellucid.machine import AVX2
    from pellucid.machine.model import to_text

    name = archive.machine_file().name
    (store.root / name).write_text(to_text(AVX2))
    export(store.directory, tmp_path / "a.tar.gz", fresh)
    _, found = install(tmp_path / "a.tar.gz", tmp_path / "to", fresh)
    assert found.notes == () and (tmp_path / "to" / name).read_text() == to_text(AVX2)
    _, found = install(tmp_path / "a.tar.gz", tmp_path / "to", fresh)
    assert found.notes == ()
    (tmp_path / "to" / name).write_text("{}")
    _, found = install(tmp_path / "a.tar.gz", tmp_path / "to", fresh)
    assert "with other figures" in found.notes[0] and (tmp_path / "to" / name).read_text() == "{}"
    monkeypatch.setattr(archive, "machine_file", lambda: Path("machine-000000000000.json"))
    _, found = install(tmp_path / "a.tar.gz", tmp_path / "third", fresh)
    assert "other cores" in found.notes[0] and not (tmp_path / "third" / name).exists()
