"""Memory: page faults, the pool's books, threads, fork, and the end of the process."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch

from pellucid.errors import UnsupportedError
from pellucid.native import loader
from pellucid.native.build import default_toolchain
from pellucid.native.instance import (
    ArenaSlot,
    ExternSlot,
    FunctionalCall,
    InputSlot,
    KernelCall,
    OutputSlot,
    PythonCall,
)
from pellucid.native.runtime import Instance, pool_limit, pool_stats, pool_trim
from pellucid.native.sources import SOURCES
from tests.unit.native.support import view

MB = 1 << 20


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def chain(kernels, n):
    """x -> 2x in the arena -> 4x, a result."""
    return Instance(
        [InputSlot(0), ArenaSlot(0), OutputSlot(4 * n)],
        [
            KernelCall(kernels["test_double"], (0, 1), (), n, n // 2, "first"),
            KernelCall(kernels["test_double"], (1, 2), (), n, n // 2, "second"),
        ],
        [view(2, n)],
        inputs=1,
        arena=4 * n,
    )


def test_steady_state_faults_no_pages(kernels):
    n = 33 * MB // 4
    instance, x = chain(kernels, n), torch.ones(n)
    for _ in range(2):
        instance.run([x])
    before = faults()
    for _ in range(10):
        instance.run([x])
    assert faults() - before < 50, "33 MB are 8448 pages"


def test_outputs_that_live_get_memory_of_their_own(add):
    instance = add(1000)
    x = torch.ones(1000)
    outs = [instance.run([x, x * i])[0] for i in range(20)]
    assert [out[0].item() for out in outs] == [1.0 + i for i in range(20)]
    assert len({out.data_ptr() for out in outs}) == 20


def test_memory_is_aligned(kernels, add):
    x = torch.ones(100)
    outs = [add(n).run([x, x])[0] for n in (1, 3, 16, 17, 100)]
    assert all(out.data_ptr() % 64 == 0 for out in outs)


def test_the_pool_keeps_its_books(add):
    gc.collect()
    pool_trim()
    start = pool_stats()
    assert start.cached == 0
    instance, x = add(10_000), torch.ones(10_000)
    out = instance.run([x, x])[0]
    held = pool_stats()
    assert 40_000 <= held.in_use - start.in_use <= 45_000 and held.misses == start.misses + 1
    del out
    freed = pool_stats()
    assert freed.in_use == start.in_use and freed.cached == held.in_use - start.in_use
    instance.run([x, x])
    assert pool_stats().hits == freed.hits + 1
    assert pool_trim() == freed.cached and pool_stats().cached == 0


@pytest.mark.parametrize("nbytes", [1, 64, 65, 512, 513, 1000, 4097, 100_001, 5 * MB + 1, 33 * MB])
def test_size_classes_waste_an_eighth_at_most(nbytes, kernels):
    pool_trim()
    before = pool_stats().in_use
    instance = Instance([OutputSlot(nbytes)], [], [view(0, nbytes, dtype=torch.uint8)], inputs=0, arena=0)
    out = instance.run([])[0]
    used = pool_stats().in_use - before
    assert nbytes <= used <= max(nbytes * 9 / 8, nbytes + 63)
    out.fill_(1)


def test_the_cache_is_bounded_and_the_least_used_goes_first(add):
    pool_trim()
    limit = pool_stats().limit
    try:
        pool_limit(3 * MB)
        x = torch.ones(MB // 2)
        old = add(MB // 4)
        old.run([x[: MB // 4]] * 2)  # 1 MB cached
        for _ in range(3):
            outs = [add(MB // 2).run([x, x])[0]]
            outs.clear()  # 2 MB cached
        assert pool_stats().cached <= 3 * MB
        held = [add(MB // 2).run([x, x])[0] for _ in range(2)]
        held.clear()  # 4 MB freed: the 1 MB block and one of 2 MB must go
        assert pool_stats().cached <= 3 * MB
        misses = pool_stats().misses
        add(MB // 2).run([x, x])
        assert pool_stats().misses == misses
        old.run([x[: MB // 4]] * 2)
        assert pool_stats().misses == misses + 1
        huge = add(2 * MB).run([torch.ones(2 * MB)] * 2)
        del huge
        assert pool_stats().cached <= 3 * MB
    finally:
        pool_limit(limit)


def test_failed_runs_leak_nothing(kernels):
    def fail(*tensors):
        raise ValueError

    slots = [InputSlot(0), ArenaSlot(0), OutputSlot(4096), ExternSlot(), ExternSlot()]
    calls = [
        FunctionalCall(torch.ops.aten.relu.default, (view(0, 4),), (), (view(3, 4),), "relu"),
        PythonCall(fail, (view(3, 4), view(1, 4), view(2, 4)), (), (view(4, 4),), "fail"),
    ]
    instance = Instance(slots, calls, [view(2, 4), view(3, 4)], inputs=1, arena=64)
    x = torch.ones(4)
    references, used = sys.getrefcount(x), pool_stats().in_use
    for _ in range(5):
        with pytest.raises(ValueError):
            instance.run([x])
    gc.collect()
    assert sys.getrefcount(x) == references and pool_stats().in_use == used


def test_an_instance_lets_go_of_its_functions(kernels):
    class Function:
        def __call__(self, x):
            return x + 1

    function = Function()
    seen = weakref.ref(function)
    call = PythonCall(function, (view(0, 4),), (), (view(1, 4),), "function")
    instance = Instance([InputSlot(0), ExternSlot()], [call], [view(1, 4)], inputs=1, arena=0)
    del function, call
    gc.collect()
    assert instance.run([torch.ones(4)])[0].tolist() == [2.0] * 4
    del instance
    gc.collect()
    assert seen() is None


def test_instances_share_arenas(kernels):
    pool_trim()
    x = torch.ones(MB)
    chain(kernels, MB).run([x])
    arenas = pool_stats().arenas
    assert arenas >= 4 * MB
    for n in (MB, MB // 2, 1000):
        chain(kernels, n).run([x[:n]])
    assert pool_stats().arenas == arenas
    pool_trim()
    assert pool_stats().arenas == 0


def test_an_arena_may_move(kernels):
    pool_trim()
    small, large = chain(kernels, 1000), chain(kernels, MB)
    for _ in range(3):
        assert small.run([torch.ones(1000)])[0][0].item() == 4
        assert large.run([torch.ones(MB)])[0][-1].item() == 4
        pool_trim()


def test_threads_run_one_instance_at_once(kernels):
    n = 200_000
    instance, wrong = chain(kernels, n), []

    def work(value):
        x = torch.full((n,), float(value))
        for _ in range(50):
            out = instance.run([x])[0]
            if not (out == 4 * value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_threads_run_python_meanwhile(kernels):
    """The GIL is released: a second thread makes progress while one long run is on."""
    n = 400 * MB // 4  # long enough for the other thread to be woken on a machine whose cores are all busy
    instance, x = chain(kernels, n), torch.ones(n)
    instance.run([x])
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    before = len(ticks)
    instance.run([x])
    after = len(ticks)
    stop.set()
    thread.join()
    assert after > before


def test_large_outputs_use_huge_pages_where_the_system_has_them(add):
    if "never" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1].split("]")[0]:
        pytest.skip("huge pages are off")
    pool_trim()
    x = torch.ones(4 * MB)
    before = faults()
    out = add(4 * MB).run([x, x])[0]
    assert faults() - before < 1000, "16 MB are 4096 pages"
    del out


# ------------------------------------------------------------------------------------- other processes

SETUP = """
import os, sys, threading, torch
from pellucid.native.build import build
from pellucid.native.instance import *
from pellucid.native.runtime import Instance
from tests.unit.native.support import DOUBLE, kernel_text, view
torch.set_num_threads(2)
n = 1 << 20
address = build({"test_double": kernel_text("test_double", DOUBLE)})[0]["test_double"]
slots = [InputSlot(0), OutputSlot(4 * n)]
instance = Instance(slots, [KernelCall(address, (0, 1), (), n, 1, "double")], [view(1, n)], inputs=1, arena=0)
x = torch.ones(n)
"""


def run_script(text: str, setup: str = SETUP, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-c", setup + textwrap.dedent(text)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_fork_after_parallel_work():
    done = run_script("""
        held = instance.run([x])[0]            # starts a team of threads
        torch.mm(torch.ones(300, 300), torch.ones(300, 300))
        child = os.fork()
        if child == 0:
            import signal
            signal.alarm(30)                   # a hang is a failure, not the end of the test
            good = bool((instance.run([x])[0] == 2).all()) and bool((held == 2).all())
            good &= torch.mm(torch.ones(300, 300), torch.ones(300, 300))[0, 0].item() == 300
            del held
            os._exit(0 if good else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert bool((instance.run([x])[0] == 2).all())
        print("child", status)
    """)
    assert done.stdout.strip() == "child 0", done.stdout + done.stderr


def test_fork_while_other_threads_run():
    done = run_script("""
        stop = False
        def work():
            while not stop:
                instance.run([x])
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        statuses = []
        for _ in range(10):
            child = os.fork()
            if child == 0:
                import signal
                signal.alarm(30)
                os._exit(0 if (instance.run([x])[0] == 2).all() else 3)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop = True
        for thread in threads:
            thread.join()
        print(statuses)
    """)
    assert done.stdout.strip() == str([0] * 10), done.stdout + done.stderr


def test_contended_cores_are_noticed_and_forks_start_afresh():
    done = run_script("""
        import subprocess, time
        from pellucid.native.runtime import contended
        if not os.path.exists("/proc/thread-self/schedstat"):
            print("True 0 True")               # this kernel does not tell
            sys.exit()
        core = min(os.sched_getaffinity(0))
        spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        os.sched_setaffinity(spinner.pid, {core})
        os.sched_setaffinity(0, {core})        # this thread; so the two share a core, whatever else runs
        try:
            end, seen = time.monotonic() + 60, False
            while not seen and time.monotonic() < end:
                instance.run([x])
                seen = contended()
            child = os.fork()
            if child == 0:
                import signal
                signal.alarm(30)
                fresh = not contended()
                os._exit(0 if fresh and bool((instance.run([x])[0] == 2).all()) else 3)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(seen, status, bool((instance.run([x])[0] == 2).all()))
        finally:
            spinner.kill()
    """)
    assert done.stdout.strip() == "True 0 True", done.stdout + done.stderr


def test_contention_ends_after_calm_windows_in_a_row(tmp_path):
    program, source = tmp_path / "contention", tmp_path / "contention.cpp"
    source.write_text("""
        #include "contention.h"
        int main() {
          pellucid::Contention cores;
          auto weigh = [&](int ran, int waited) {
            cores.weigh(ran, waited);
            std::putchar(cores.contended() ? '1' : '0');
          };
          weigh(100, 0), weigh(90, 10);                              // 10% is not contended
          weigh(80, 20), weigh(90, 10);                              // 20% is, and then 10% still
          weigh(100, 0), weigh(100, 0), weigh(100, 0), weigh(90, 10);  // three calm windows, then none
          weigh(100, 0), weigh(100, 0), weigh(100, 0), weigh(100, 0);  // four
          weigh(0, 100);
          cores.end();
          std::putchar(cores.contended() ? '1' : '0');
        }
    """)
    compiler = (*default_toolchain().compiler, "-std=c++20", "-I", SOURCES)
    subprocess.run([*compiler, source, "-o", program, "-lgomp", "-pthread"], check=True)
    assert subprocess.check_output([program], text=True) == "00111111111010"


def test_tensors_that_live_at_exit_do_no_harm():
    done = run_script("""
        import builtins
        builtins.kept = instance.run([x])[0]
        builtins.instance = instance
        thread = threading.Thread(target=lambda: setattr(builtins, "more", instance.run([x])))
        thread.start()
        thread.join()
        print("fine")
    """)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_one_openmp_runtime():
    done = run_script("""
        instance.run([x])
        libraries = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/", 1)[-1]}
        print(len(libraries))
    """)
    assert done.stdout.strip() == "1", done.stdout + done.stderr


def test_out_of_memory_is_an_error():
    done = run_script("""
        big = Instance([OutputSlot(1 << 46)], [], [view(0, 1 << 44)], inputs=0, arena=0)
        try:
            big.run([])
        except MemoryError as error:
            print(error)
        try:
            Instance([], [], [], inputs=0, arena=1 << 46).run([])
        except MemoryError:
            print("arena")
        print((instance.run([x])[0] == 2).all().item())
    """)
    expected = f"out of memory: cannot allocate {1 << 46} bytes for a result\narena\nTrue"
    assert done.stdout.strip() == expected, done.stdout + done.stderr


def test_without_the_fast_way_to_wrap_tensors():
    """The public function that takes over a handle does the same, more slowly."""
    done = run_script("""
        from pellucid.native import loader
        assert loader._wrapper() is not None
        loader._library.cache_clear()
        loader._wrapper = lambda: None
        slow = Instance(slots, [KernelCall(address, (0, 1), (), n, 1, "double")], [view(1, n)] * 2, inputs=1, arena=0)
        for _ in range(3):
            first, second = slow.run([x])
            assert (first == 2).all() and first is second
        from pellucid.native.runtime import pool_stats
        del first, second
        print(pool_stats().in_use)
    """)
    assert done.stdout.strip() == "0", done.stdout + done.stderr


@pytest.mark.sampled
def test_warm_up_returns_at_once_and_serves_the_first_build(tmp_path):
    script = """
        import time
        import torch
        from pellucid.native import compiler
        from pellucid.native.build import build, default_store
        from pellucid.native.warm_up import warm_up
        from pellucid.native.runtime import Instance
        from tests.unit.native.support import DOUBLE, kernel_text
        compiler.shipped = lambda _: None
        started = time.perf_counter()
        warm_up()
        warm = time.perf_counter() - started
        build({"k": kernel_text("k", DOUBLE)})
        Instance([], [], [], inputs=0, arena=0).run([])
        assert warm < (time.perf_counter() - started) / 2, warm  # the rest is what it did beside us
        wanted = {"prelude.h", "libtorch_cpu.so", "shared-products_float.o", "shared-dots_float.o"}
        while not wanted <= {path.name for path in (default_store().directory / "files").iterdir()}:
            assert time.perf_counter() - started < 60
            time.sleep(0.1)
        print("good")
    """
    done = run_script(script, setup="", PELLUCID_CACHE_DIR=str(tmp_path / "cache"))
    assert done.stdout.strip() == "good", done.stdout + done.stderr


def test_a_process_may_end_while_the_runtime_is_being_checked(tmp_path):
    script = """
        import threading
        import torch
        from pellucid.native import warm_up
        checking = threading.Event()
        def check():
            checking.set()
            for _ in range(100_000):  # the interpreter that ends a thread in here would abort the process
                torch.ones(2).add_(1)
        warm_up.library = check
        warm_up.warm_up()
        checking.wait(60)
    """
    done = run_script(script, setup="", PELLUCID_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr


def test_tensor_objects_of_an_unknown_layout_are_refused():
    with pytest.raises(UnsupportedError, match="have no TensorImpl pointer"):
        loader._offset("TensorImpl", [torch.ones(1)], id, lambda tensor: 12345)
