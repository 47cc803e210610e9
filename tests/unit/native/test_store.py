from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path

import pytest

from pellucid.errors import StoreError
from pellucid.native.store import KernelStore, batch_id, default_root

KERNELS = {"k1": "text one", "k2": "text two"}


@pytest.fixture
def store(tmp_path) -> KernelStore:
    return KernelStore("key", tmp_path / "store")


def add(store: KernelStore, kernels=KERNELS, content: bytes = b"library") -> Path:
    with store.workspace() as work:
        (work / "k.so").write_bytes(content)
        return store.add(kernels, work / "k.so", "// source")


def test_what_is_added_is_found(store):
    assert store.find(KERNELS) == {}
    path = add(store)
    assert store.find(KERNELS) == {"k1": path, "k2": path}
    assert path.read_bytes() == b"library" and path.with_suffix(".cpp").read_text() == "// source"
    again = KernelStore("key", store.root)
    assert again.find({"k2": "text two", "k3": "?"}) == {"k2": path}
    assert not list((store.directory / "tmp").iterdir())


def test_keys_do_not_mix(store):
    add(store)
    assert KernelStore("other", store.root).find(KERNELS) == {}


def test_a_name_with_another_text_is_another_kernel(store):
    add(store)
    assert store.find({"k1": "text three"}) == {}
    path = add(store, {"k1": "text three"}, b"other")
    assert store.find({"k1": "text three"}) == {"k1": path}


def test_the_batch_is_named_by_its_content():
    assert batch_id(KERNELS) == batch_id(dict(reversed(KERNELS.items())))
    assert batch_id(KERNELS) != batch_id({**KERNELS, "k1": "other"})


def test_files(store):
    assert store.file("header.gch") is None
    with store.workspace() as work:
        (work / "made").write_bytes(b"12")
        path = store.add_file("header.gch", work / "made")
    assert store.file("header.gch") == path and path.read_bytes() == b"12"


def test_a_store_cleared_by_another_process_carries_on(store):
    add(store)
    shutil.rmtree(store.directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn", lambda *a, **k: pytest.fail("no need to leave the store"))
        path = add(store)
    assert store.find(KERNELS) == {"k1": path, "k2": path}


def test_files_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        store = KernelStore("key", tmp_path / "store")
        path = add(store)
        fresh = KernelStore("key", tmp_path / "store")
        assert set(fresh.find(KERNELS)) == {"k1", "k2"}
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o077 == 0 and store.root.stat().st_mode & 0o077 == 0


def test_default_root(monkeypatch, tmp_path):
    monkeypatch.delenv("PELLUCID_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_root() == Path("/home/somebody/.cache/pellucid")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert default_root() == Path("/var/xdg/pellucid")
    monkeypatch.setenv("PELLUCID_CACHE_DIR", str(tmp_path))
    assert default_root() == tmp_path


def test_what_nobody_has_used_for_a_month_goes_when_a_new_key_comes(store):
    add(store)
    old = time.time() - 40 * 24 * 3600
    os.utime(store.directory, (old, old))
    KernelStore("key", store.root)  # a use
    KernelStore("second", store.root)
    assert store.directory.exists()
    os.utime(store.directory, (old, old))
    KernelStore("third", store.root)
    assert not store.directory.exists()


def test_leftovers_of_dead_builds_are_removed(store):
    stale = store.directory / "tmp" / "tmpabc"
    stale.mkdir()
    (stale / "x.o").write_bytes(b"")
    fresh = store.directory / "tmp" / "tmpdef"
    fresh.mkdir()
    os.utime(stale, (1, 1))
    KernelStore("key", store.root)
    assert not stale.exists() and fresh.exists()


def test_stores_that_others_can_write_are_refused(tmp_path):
    root = tmp_path / "store"
    KernelStore("key", root)
    for directory in (root, root / "key", root / "key" / "batches"):
        mode = directory.stat().st_mode
        directory.chmod(0o775)
        with pytest.raises(StoreError, match="can be written by other users") as error:
            KernelStore("key", root)
        assert error.value.hint == f"chmod go-w {directory}"
        directory.chmod(mode)
    KernelStore("key", root)


def test_stores_of_another_user_are_refused(tmp_path, monkeypatch):
    root = tmp_path / "store"
    KernelStore("key", root)
    if os.geteuid() == 0:
        os.chown(root, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match=r"belongs to another user \(uid"):
        KernelStore("key", root)


def test_an_unsafe_default_gives_way_to_a_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("PELLUCID_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "pellucid").mkdir()
    (tmp_path / "pellucid").chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by other users"):
        store = KernelStore("key")
    assert not store.directory.is_relative_to(tmp_path / "pellucid")
    add(store)
    assert set(store.find(KERNELS)) == {"k1", "k2"}
    assert list((tmp_path / "pellucid").iterdir()) == []
