"""Fault injection for the store of kernels: damage, races, full and read-only disks, processes that die."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.errors import StoreError, ToolchainError
from pellucid.native import build as build_module
from pellucid.native import children as children_module
from pellucid.native import compiler as compiler_module
from pellucid.native import library as library_module
from pellucid.native import store as store_module
from pellucid.native.build import build, default_toolchain
from pellucid.native.children import Children, Stopped
from pellucid.native.session import SESSION
from pellucid.native.store import KernelStore
from pellucid.native.toolchain import Toolchain
from tests.support import native_function

ROOT = Path(__file__).parents[2]


def kernel(name: str, value: int = 1) -> str:
    return f'extern "C" int64_t {name}(void* const*, const int64_t*, int64_t, int64_t) {{ return {value}; }}\n'


def call(address: int) -> int:
    return native_function(address)(None, None, 0, 0)


@pytest.fixture
def store(tmp_path, monkeypatch) -> KernelStore:
    """A store with a small header, so that a test spends no time on the precompiled one."""
    monkeypatch.setattr("pellucid.native.compiler.SOURCES", tmp_path)
    (tmp_path / "prelude.h").write_text("#include <stdint.h>\n")
    return KernelStore("key", tmp_path / "store")


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Kernels that earlier tests have loaded do not count."""
    monkeypatch.setattr(SESSION, "addresses", {})


def reopened(store: KernelStore, monkeypatch) -> KernelStore:
    monkeypatch.setattr(SESSION, "addresses", {})
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


@pytest.mark.sampled
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


@pytest.mark.sampled
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["prelude.h.gch", "prelude.h", "libtorch_cpu.so", "prelude.h.gch.sum"])
def test_damaged_headers_are_made_again(store, monkeypatch, damage, name):
    build({"k1": kernel("k1")}, store=store)
    damage(store.directory / "files" / name)
    addresses, _ = build({"k2": kernel("k2", 5)}, store=reopened(store, monkeypatch))
    assert call(addresses["k2"]) == 5
    assert KernelStore(store.key, store.root).file("prelude.h.gch") is not None


@pytest.mark.sampled
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["shared-products_float.o", "shared-products_float.o.sum"])
def test_what_kernels_share_is_compiled_again_if_it_is_damaged(store, tmp_path, monkeypatch, damage, name):
    monkeypatch.setattr("pellucid.native.compiler.shipped", lambda _: None)
    (tmp_path / "prelude.h").write_text("""
        #include <stdint.h>
        namespace pv { template <class T> int64_t contract(T a) { return a + 1; } }
        #define PV_SHARED_products_float(TEMPLATE) TEMPLATE int64_t contract<int>(int);
        #define PV_SHARED_halves_float(TEMPLATE)
        #define PV_SHARED_dots_float(TEMPLATE)
        namespace pv { PV_SHARED_products_float(extern template) }
    """)

    def adding(name: str, value: int) -> str:
        return kernel(name).replace("return 1", f"return pv::contract<int>({value})")

    build({"k1": adding("k1", 4)}, store=store)
    damage(store.directory / "files" / name)
    addresses, _ = build({"k2": adding("k2", 6)}, store=reopened(store, monkeypatch))
    assert call(addresses["k2"]) == 7
    assert KernelStore(store.key, store.root).file("shared-products_float.o") is not None


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


@pytest.mark.sampled
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


@pytest.mark.sampled
def test_processes_that_build_overlapping_batches_are_all_right(tmp_path):
    (tmp_path / "prelude.h").write_text("#include <stdint.h>\n")
    processes = [builder(tmp_path, 0, 4), builder(tmp_path, 0, 6)]
    for process in _started(processes):
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    store = KernelStore("key", tmp_path / "store")
    assert len(store.find({f"k{i}": kernel(f"k{i}", i) for i in range(6)})) == 6


@pytest.mark.sampled
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
    with pytest.warns(UserWarning, match=rf"stores the kernels that it builds in .*{os.strerror(number)}"):
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
    full = f"""case "$*" in *"-o {store.root}"*kernels.o)
        echo "fatal error: error writing to kernels.o: No space left on device" >&2; exit 1;; esac"""
    with pytest.warns(UserWarning, match="No space left on device"):
        addresses, _ = build({"k1": kernel("k1", 4)}, faulty(tmp_path, full), store)
    assert call(addresses["k1"]) == 4


@contextlib.contextmanager
def file_system(where: Path, options: str):
    """A file system of its own at `where`; the test is skipped where nothing may be mounted."""
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(where)], capture_output=True).returncode:
        pytest.skip("only root can mount a file system, and not in every container")
    where.chmod(0o700)
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)  # libraries from it stay loaded


def test_a_really_full_disk(tmp_path, monkeypatch):
    with file_system(tmp_path / "small", "size=256k") as mounted:
        monkeypatch.setattr("pellucid.native.compiler.SOURCES", tmp_path)
        (tmp_path / "prelude.h").write_text("#include <stdint.h>\n#include <vector>\n")
        store = KernelStore("key", mounted / "store")
        with pytest.warns(UserWarning, match="No space left on device"):
            addresses, _ = build({f"k{i}": kernel(f"k{i}", i) + "// " + "x" * 40_000 for i in range(8)}, store=store)
        assert [call(addresses[f"k{i}"]) for i in range(8)] == list(range(8))


def test_a_store_mounted_noexec_loads_from_memory(tmp_path, monkeypatch):
    with file_system(tmp_path / "noexec", "noexec") as mounted:
        monkeypatch.setattr("pellucid.native.compiler.SOURCES", tmp_path)
        (tmp_path / "prelude.h").write_text("#include <stdint.h>\n")
        store = KernelStore("key", mounted / "store")
        for i in range(3):  # each from a file of its own, which must not be taken for another
            addresses, report = build({f"k{i}": kernel(f"k{i}", i)}, store=store)
            assert report.built and call(addresses[f"k{i}"]) == i
        _, report = build({"k1": kernel("k1", 1)}, store=reopened(store, monkeypatch))
        assert report.found == ("k1",)


def test_a_machine_that_loads_no_code_says_so(store, monkeypatch):
    def refuse(path, mode):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(library_module, "_copy_in_memory", lambda path: "/proc/self/fd/99")
    monkeypatch.setattr(build_module.ctypes, "CDLL", refuse)
    with pytest.raises(ToolchainError, match="compiled code cannot be loaded") as error:
        build({"k1": kernel("k1")}, store=store)
    assert "noexec" in error.value.hint


# ------------------------------------------------------------------------------------------ who owns the store


def test_a_store_of_root_is_trusted_by_others(store, monkeypatch):
    """As in a container image whose store was filled while it was built."""
    build({"k1": kernel("k1", 6)}, store=store)
    if os.geteuid() != 0:
        pytest.skip("only root can make files of root")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    addresses, report = build({"k1": kernel("k1", 6)}, store=reopened(store, monkeypatch))
    assert report.found == ("k1",) and call(addresses["k1"]) == 6


def test_a_file_of_another_user_in_the_store_is_not_loaded(store, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    build({"k1": kernel("k1")}, store=store)
    for path in store.directory.glob("batches/*.so"):
        os.chown(path, 12345, -1)
    assert reopened(store, monkeypatch).find({"k1": kernel("k1")}) == {}


def test_a_store_that_others_could_exchange_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError, match=r"can be replaced by other users, who can write to .*open") as error:
        KernelStore("key", tmp_path / "open" / "store")
    assert error.value.hint.startswith(f"chmod o-w {tmp_path / 'open'}")
    (tmp_path / "open").chmod(0o1777)  # as /tmp is: nobody can rename what is another's
    KernelStore("key", tmp_path / "open" / "store")


def test_a_link_is_followed_once(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    store = KernelStore("key", link)
    link.unlink()
    link.symlink_to("/")
    assert store.root == tmp_path / "mine" and store.directory == tmp_path / "mine" / "key"


# ------------------------------------------------------------------------------------------ directories that go


def test_a_store_deleted_while_the_process_runs_is_made_again(store, monkeypatch):
    build({"k1": kernel("k1")}, store=store)
    shutil.rmtree(store.root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        addresses, report = build({"k2": kernel("k2", 2)}, store=store)
    assert report.built == ("k2",) and call(addresses["k2"]) == 2 and store.file("prelude.h.gch")


def test_a_temporary_store_deleted_while_the_process_runs_is_made_again(store, monkeypatch):
    """A forked child loses it when its parent exits."""
    with pytest.warns(UserWarning, match="No space left"):
        store.out_of_space(store.directory)
    build({"k1": kernel("k1")}, store=store)
    shutil.rmtree(store.directory.parent)
    addresses, _ = build({"k2": kernel("k2", 2)}, store=store)
    assert call(addresses["k2"]) == 2


def test_a_relative_store_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = KernelStore("key", Path("kernels"))
    monkeypatch.chdir("/")
    assert store.directory == tmp_path / "kernels" / "key"


def test_a_relative_store_in_a_deleted_directory_says_so(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match="the kernel store kernels cannot be found") as error:
        KernelStore("key", Path("kernels"))
    assert "full path" in error.value.hint
    KernelStore("key", tmp_path / "store")


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("home", [no_home, lambda: Path("relative")])
def test_without_a_home_the_store_is_in_the_temporary_directory(home, tmp_path, monkeypatch):
    for name in ("PELLUCID_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store_module.Path, "home", home)
    monkeypatch.setattr(store_module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert store_module.default_root() == tmp_path / f"pellucid-{os.geteuid()}"


def test_a_path_with_spaces_and_letters_of_any_language(tmp_path, monkeypatch):
    monkeypatch.setattr("pellucid.native.compiler.SOURCES", tmp_path)
    (tmp_path / "prelude.h").write_text("#include <stdint.h>\n")
    addresses, _ = build({"k1": kernel("k1", 8)}, store=KernelStore("key", tmp_path / "mein Lager: ядро 核"))
    assert call(addresses["k1"]) == 8


# ------------------------------------------------------------------------------------------ the compiler


def faulty(tmp_path: Path, script: str) -> Toolchain:
    """The toolchain of this process, whose compiler first runs a shell script."""
    fake, real = tmp_path / "faulty-g++", default_toolchain()
    fake.write_text(f'#!/bin/sh\n{script}\nexec {real.compiler[0]} "$@"\n')
    fake.chmod(0o755)
    return replace(real, compiler=(str(fake),))


KILLED = {
    "the driver": "kill -9 $$",
    "its child": 'echo "g++: fatal error: Killed signal terminated program cc1plus" >&2; exit 1',
}


@pytest.mark.parametrize("how", KILLED)
def test_a_killed_compiler_is_run_again(store, tmp_path, how):
    once = f'case "$*" in *kernels.o*) mkdir {tmp_path}/done 2> /dev/null && {{ {KILLED[how]}; }};; esac'
    addresses, _ = build({f"k{i}": kernel(f"k{i}", i) for i in range(3)}, faulty(tmp_path, once), store)
    assert [call(addresses[f"k{i}"]) for i in range(3)] == [0, 1, 2]
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("how", KILLED)
def test_a_compiler_killed_again_and_again_is_a_clear_error(store, tmp_path, how):
    always = f'case "$*" in *kernels.o*) {KILLED[how]};; esac'
    with pytest.raises(ToolchainError, match="was killed, twice: it was compiling k1") as error:
        build({"k1": kernel("k1")}, faulty(tmp_path, always), store)
    assert "run out of memory" in error.value.hint


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(store, tmp_path, monkeypatch):
    hang = f'case "$*" in *kernels.o*) sleep 1000 & echo $! > {tmp_path}/pid; wait;; esac'
    toolchain = faulty(tmp_path, hang)
    build({"k0": kernel("k0")}, store=store)  # headers
    monkeypatch.setattr(compiler_module, "_TIMEOUT_S", 0.5)
    with pytest.raises(ToolchainError, match=r"did not finish in 0.5 s and was ended"):
        build({"k1": kernel("k1")}, toolchain, store)
    assert ended(int((tmp_path / "pid").read_text()))


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has waited for, within ten seconds."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_failure_whose_status_is_lost_is_still_a_failure(store, tmp_path):
    """A program that ignores SIGCHLD never learns how its children ended."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        addresses, _ = build({"k1": kernel("k1", 3)}, store=store)
        assert call(addresses["k1"]) == 3
        with pytest.raises(build_module.KernelCompileError, match="refused kernel k2"):
            build({"k2": "this is no C++"}, store=store)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_as_many_compilers_as_cores(store, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "_SHARD_CHARS", 1)
    count_running = f"""case "$*" in *" -c "*kernels.o)
        touch {tmp_path}/running.$$; ls {tmp_path}/running.* | wc -l >> {tmp_path}/counts; sleep 0.1
        {default_toolchain().compiler[0]} "$@"; status=$?; rm {tmp_path}/running.$$; exit $status;; esac"""
    toolchain = faulty(tmp_path, count_running)
    for cores, memory, most in ((3, 1 << 40, 3), (3, 0, 1), (1, 1 << 40, 1)):
        monkeypatch.setattr(children_module, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(build_module, "usable_cores", lambda: 4)  # which makes shards enough
        monkeypatch.setattr(children_module, "available_memory", lambda memory=memory: memory)
        (tmp_path / "counts").write_text("")
        kernels = {f"k{cores}_{memory}_{i}": kernel(f"k{cores}_{memory}_{i}") for i in range(6)}
        threads = [threading.Thread(target=build, args=(part, toolchain, store)) for part in halves(kernels)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
        assert len(counts) == 6 and min(2, most) <= max(counts) <= most


def halves(kernels: dict[str, str]) -> list[dict[str, str]]:
    names = list(kernels)
    return [{name: kernels[name] for name in part} for part in (names[:3], names[3:])]


def test_an_interrupted_build_ends_its_compilers(store, tmp_path, monkeypatch):
    """Ctrl-C does not wait for what is being compiled, and the next build works."""
    monkeypatch.setattr(build_module, "_SHARD_CHARS", 1)
    monkeypatch.setattr(children_module, "available_memory", lambda: 1 << 40)
    hang = f'case "$*" in *kernels.o*) touch {tmp_path}/started.$$; sleep 1000 & wait;; esac'
    sources = {f"k{i}": kernel(f"k{i}", i) for i in range(4)}
    build({"k9": kernel("k9")}, store=store)  # headers

    def interrupt() -> None:
        while not list(tmp_path.glob("started.*")):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        build(sources, faulty(tmp_path, hang), store)
    for path in tmp_path.glob("started.*"):
        assert ended(int(path.suffix[1:]))
    addresses, _ = build(sources, store=store)
    assert [call(addresses[name]) for name in sources] == [0, 1, 2, 3]


def test_a_build_that_is_given_up_starts_nothing_more(store):
    children = Children()
    children.stop()
    with pytest.raises(Stopped):
        children.run(["true"], store, 1)


def test_the_first_failure_ends_the_rest():
    children = Children()

    def one(number: int) -> int:
        if number == 0:
            raise ValueError("first")
        while not children.stopped:
            time.sleep(0.01)
        raise Stopped

    with pytest.raises(ValueError, match="first"):
        children.each(one, [0, 1, 2])
