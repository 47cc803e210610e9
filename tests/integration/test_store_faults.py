"""Fault injection for the store of kernels: damage, races, full and read-only disks, processes that die."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pellucid.errors import StoreError
from pellucid.native import build as build_module
from pellucid.native import store as store_module
from pellucid.native.build import build
from pellucid.native.store import KernelStore

ROOT = Path(__file__).parents[2]


def kernel(name: str, value: int = 1) -> str:
    return f'extern "C" int64_t {name}(void* const*, const int64_t*, int64_t, int64_t) {{ return {value}; }}\n'


def call(address: int) -> int:
    signature = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return signature(address)(None, None, 0, 0)


@pytest.fixture
def store(tmp_path, monkeypatch) -> KernelStore:
    """A store with a small header, so that a test spends no time on the precompiled one."""
    monkeypatch.setattr("pellucid.native.compiler.SOURCES", tmp_path)
    (tmp_path / "prelude.h").write_text("#include <stdint.h>\n")
    return KernelStore("key", tmp_path / "store")


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Kernels that earlier tests have loaded do not count."""
    monkeypatch.setattr(build_module, "_addresses", {})


def reopened(store: KernelStore, monkeypatch) -> KernelStore:
    monkeypatch.setattr(build_module, "_addresses", {})
    return KernelStore(store.key, store.root)


def put(path: Path, data: bytes) -> None:
    """A new file in place of one that this process may have mapped."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").chmod(path.stat().st_mode)
    path.with_suffix(".new").replace(path)


def damage_truncate(path: Path) -> None:
    put(path, path.read_bytes()[: path.stat().st_size // 2])


def damage_empty(path: Path) -> None:
    put(path, b"")


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    put(path, bytes(data))


def damage_remove(path: Path) -> None:
    path.unlink()


def damage_garbage(path: Path) -> None:
    put(path, os.urandom(100))


DAMAGES = [damage_truncate, damage_empty, damage_flip, damage_remove, damage_garbage]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["batches/*.so", "kernels/*"])
def test_damaged_entries_are_built_again(store, monkeypatch, damage, which):
    sources = {"k1": kernel("k1", 7)}
    build(sources, store=store)
    for path in store.directory.glob(which):
        damage(path)
    addresses, report = build(sources, store=reopened(store, monkeypatch))
    assert report.built == ("k1",) and call(addresses["k1"]) == 7
    _, report = build(sources, store=reopened(store, monkeypatch))
    assert report.found == ("k1",)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["prelude.h.gch", "prelude.h", "libtorch_cpu.so", "prelude.h.gch.sum"])
def test_damaged_headers_are_made_again(store, monkeypatch, damage, name):
    build({"k1": kernel("k1")}, store=store)
    damage(store.directory / "files" / name)
    addresses, _ = build({"k2": kernel("k2", 5)}, store=reopened(store, monkeypatch))
    assert call(addresses["k2"]) == 5
    assert KernelStore(store.key, store.root).file("prelude.h.gch") is not None


def test_a_whole_library_that_cannot_be_loaded_is_built_again(store, monkeypatch):
    with store.workspace() as work:
        (work / "k.so").write_bytes(b"not a library at all")
        store.add({"k1": kernel("k1", 3)}, work / "k.so", "")
    addresses, report = build({"k1": kernel("k1", 3)}, store=reopened(store, monkeypatch))
    assert report.built == ("k1",) and call(addresses["k1"]) == 3


def test_entries_that_others_could_write_are_not_loaded(store, monkeypatch):
    build({"k1": kernel("k1")}, store=store)
    for path in store.directory.glob("batches/*.so"):
        path.chmod(0o777)
    assert reopened(store, monkeypatch).find({"k1": kernel("k1")}) == {}


BUILDER = """
    import os, sys
    from pathlib import Path
    import pellucid.native.compiler as compiler
    from pellucid.native.build import build
    from pellucid.native.store import KernelStore
    root = Path(sys.argv[1])
    compiler.SOURCES = root
    from tests.integration.test_store_faults import call, kernel
    store = KernelStore("key", root / "store")
    names = [f"k{i}" for i in range(int(sys.argv[2]), int(sys.argv[3]))]
    print("ready", flush=True)
    sys.stdin.readline()
    addresses, report = build({name: kernel(name, i) for i, name in enumerate(names)}, store=store)
    assert [call(addresses[name]) for name in names] == list(range(len(names)))
    print(len(report.built))
"""


def builder(tmp_path: Path, first: int, last: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BUILDER), str(tmp_path), str(first), str(last)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def test_processes_that_build_the_same_at_once_are_all_right(tmp_path):
    (tmp_path / "prelude.h").write_text("#include <stdint.h>\n")
    processes = [builder(tmp_path, 0, 5), builder(tmp_path, 0, 5)]
    outs = [process.communicate("go\n", timeout=60)[0].strip() for process in _started(processes)]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(outs) == ["0", "5"], "the second one waits for the first and takes what it built"


def _started(processes):
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return processes


def test_processes_that_build_overlapping_batches_are_all_right(tmp_path):
    (tmp_path / "prelude.h").write_text("#include <stdint.h>\n")
    processes = [builder(tmp_path, 0, 4), builder(tmp_path, 0, 6)]
    for process in _started(processes):
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    store = KernelStore("key", tmp_path / "store")
    assert len(store.find({f"k{i}": kernel(f"k{i}", i) for i in range(6)})) == 6


def test_a_killed_build_leaves_nothing_half_done(tmp_path):
    (tmp_path / "prelude.h").write_text("#include <stdint.h>\n")
    for delay in (0.02, 0.06, 0.1, 0.15):
        process = builder(tmp_path, 0, 4)
        _started([process])
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process = builder(tmp_path, 0, 4)
    process.communicate("go\n", timeout=60)
    assert process.returncode == 0


class Disk:
    """Makes writes under a directory fail with an error number."""

    def __init__(self, monkeypatch, directory: Path, number: int) -> None:
        real_replace, real_mkdtemp = os.replace, store_module.tempfile.mkdtemp

        def check(path: object) -> None:
            if Path(str(path)).is_relative_to(directory):
                raise OSError(number, os.strerror(number), str(path))

        def replace(source, target):
            check(target)
            real_replace(source, target)

        def mkdtemp(*args, **kwargs):
            check(kwargs.get("dir") or "/")
            return real_mkdtemp(*args, **kwargs)

        monkeypatch.setattr(store_module.os, "replace", replace)
        monkeypatch.setattr(store_module.tempfile, "mkdtemp", mkdtemp)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_store_that_cannot_be_written_is_read_and_the_rest_goes_elsewhere(store, monkeypatch, number):
    build({"k1": kernel("k1")}, store=store)
    Disk(monkeypatch, store.root, number)
    fresh = reopened(store, monkeypatch)
    _, report = build({"k1": kernel("k1")}, store=fresh)
    assert report.found == ("k1",)
    with pytest.warns(UserWarning, match=rf"keeps the kernels it builds in .*{os.strerror(number)}"):
        addresses, report = build({"k1": kernel("k1"), "k2": kernel("k2", 9)}, store=fresh)
    assert report.found == ("k1",) and report.built == ("k2",) and call(addresses["k2"]) == 9
    assert not fresh.directory.is_relative_to(store.root)


def test_no_place_at_all_is_a_clear_error(store, monkeypatch):
    Disk(monkeypatch, Path("/"), errno.ENOSPC)
    monkeypatch.setattr(store_module, "_temporary_root", store_module._temporary_root.__wrapped__)
    with pytest.raises(StoreError, match="No space left on device") as error:
        build({"k1": kernel("k1")}, store=store)
    assert "free some space" in error.value.hint


def test_a_compiler_that_runs_out_of_disk_is_run_again_elsewhere(store, monkeypatch, tmp_path):
    """The compiler's own message about a full disk is understood, not taken for the kernel's fault."""
    real = build_module.default_toolchain()
    fake = tmp_path / "g++"
    fake.write_text(f"""#!/bin/sh
for word in "$@"; do case "$word" in
  {store.root}/*kernels.o) echo "fatal error: error writing to kernels.o: No space left on device" >&2; exit 1;;
esac; done
exec {real.compiler[0]} "$@"
""")
    fake.chmod(0o755)
    from dataclasses import replace

    with pytest.warns(UserWarning, match="No space left on device"):
        addresses, _ = build({"k1": kernel("k1", 4)}, replace(real, compiler=(str(fake),)), store)
    assert call(addresses["k1"]) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_really_full_disk(tmp_path, monkeypatch):
    mounted = tmp_path / "small"
    mounted.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mounted)], capture_output=True
    ).returncode:
        pytest.skip("this container may not mount")
    try:
        mounted.chmod(0o700)
        monkeypatch.setattr("pellucid.native.compiler.SOURCES", tmp_path)
        (tmp_path / "prelude.h").write_text("#include <stdint.h>\n#include <vector>\n")
        store = KernelStore("key", mounted / "store")
        with pytest.warns(UserWarning, match="No space left on device"):
            addresses, _ = build({f"k{i}": kernel(f"k{i}", i) + "// " + "x" * 40_000 for i in range(8)}, store=store)
        assert [call(addresses[f"k{i}"]) for i in range(8)] == list(range(8))
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)  # libraries from it stay loaded
