"""What happens to programs in the field: forks, threads, signals, exits, foreign machines, bad indices, no memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pellucid import support
from pellucid.errors import UnsupportedError, UserError
from pellucid.native import children as children_module
from pellucid.native.build import build
from pellucid.native.runtime import pool_trim
from pellucid.native.store import KernelStore
from pellucid.options import check_environment, make_options

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="pellucid")


def python(code: str, *args: object, wait: bool = True, **environment: str) -> subprocess.Popen[str]:
    """A new process that runs `code`; with `wait`, until its end, which must be a good one."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if wait:
        process.out, process.err = process.communicate(timeout=300)  # type: ignore[attr-defined]
        assert process.returncode == 0, process.err  # type: ignore[attr-defined]
    return process


# ------------------------------------------------------------------------------------------ stores and compilers

SAME = """
    import torch
    def function(x):
        return torch.softmax(x * 2 + 1, -1), x.cumsum(0), (x > 0).sum(), x.amax(1).exp()
    x = torch.randn(9, 33, generator=torch.Generator().manual_seed(1))
    run = torch.compile(function, backend="pellucid")
    for ours, theirs in zip(run(x), function(x)):
        torch.testing.assert_close(ours, theirs)
    print("good")
"""


@pytest.mark.sampled
def test_processes_that_start_together_on_an_empty_store_compile_each_kernel_once(tmp_path):
    compilers = tmp_path / "compilers"
    compilers.mkdir()
    fake = tmp_path / "g++"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *kernels.cpp*) touch {compilers}/$$;; esac\nexec g++ "$@"\n')
    fake.chmod(0o755)
    count = int(os.environ.get("TEST_PROCESSES", "4"))
    environment = {"PELLUCID_CACHE_DIR": str(tmp_path / "store"), "CXX": str(fake)}
    processes = [python(SAME, wait=False, **environment) for _ in range(count)]
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0 and out == "good\n", err
    batches = list((tmp_path / "store").glob("v1-*/batches/*.so"))
    assert len(batches) == len(list(compilers.iterdir())), "a batch was compiled more than once"


@pytest.mark.sampled
def test_a_filled_store_works_without_a_compiler_and_for_another_user(tmp_path):
    """As a container image in which root has run the program once."""
    store = tmp_path / "store"
    python(SAME, PELLUCID_CACHE_DIR=str(store))
    no_compiler = {"PELLUCID_CACHE_DIR": str(store), "PATH": str(tmp_path), "CXX": ""}
    assert python(SAME, **no_compiler).out == "good\n"
    changed = SAME.replace("x * 2 + 1", "x * 3 + 1")
    process = python(changed, wait=False, **no_compiler)
    _, err = process.communicate(timeout=300)
    assert "no C++ compiler found" in err and "lacks something that is needed" in err
    for facts in ("-O1", "-march=x86-64"):  # never what other flags have made
        process = python(SAME, wait=False, **no_compiler, PELLUCID_CXXFLAGS=facts)
        assert "no C++ compiler found" in process.communicate(timeout=300)[1]


# ------------------------------------------------------------------------------------------ processes and threads


@pytest.mark.sampled
def test_a_forked_child_runs_and_compiles(tmp_path):
    python(
        """
        import os, sys, torch
        run = torch.compile(lambda x: (x * 2).sin(), backend="pellucid")
        x = torch.randn(200_000)
        want = (x * 2).sin()
        torch.testing.assert_close(run(x), want)
        child = os.fork()
        torch.testing.assert_close(run(x), want)
        if child == 0:
            other = torch.compile(lambda x: torch.softmax(x, 0) + 1, backend="pellucid")
            torch.testing.assert_close(other(x[:77]), torch.softmax(x[:77], 0) + 1)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """
    )


@pytest.mark.sampled
def test_a_fork_while_another_thread_compiles_does_not_hang(tmp_path):
    python(
        """
        import os, threading, time, torch
        from pellucid.native.session import SESSION
        held, forked = threading.Event(), threading.Event()
        def hold():
            with SESSION.lock:  # as if it compiled
                held.set()
                forked.wait()
        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()
        forked.set()
        if child == 0:
            run = torch.compile(lambda x: x * 3 - 1, backend="pellucid")
            assert torch.equal(run(torch.ones(5)), torch.full((5,), 2.0))
            os._exit(7)
        for _ in range(2400):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            time.sleep(0.1)
        else:
            os.kill(child, 9)
            raise SystemExit("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 7, status
        """
    )


def test_threads_compile_and_call_at_once() -> None:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.softmax(x * n, -1)

    run, x, wrong = compiled(function), torch.randn(64, 100), []

    def work(number: int) -> None:
        for n in (number, number + 1, number):
            ours = run(x, n)
            if not torch.allclose(ours, function(x, n)):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_number_of_threads_may_change_after_compilation() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).sin(), x.sum(0)

    run, before = compiled(function), torch.get_num_threads()
    x = torch.randint(-9, 9, (512, 700)).float()  # whose sums are exact, in any order
    allowed = os.sched_getaffinity(0)
    try:
        for threads in (1, 4, 2):
            torch.set_num_threads(threads)
            torch.testing.assert_close(run(x), function(x))
        os.sched_setaffinity(0, {min(allowed)})
        torch.testing.assert_close(run(x), function(x))
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(before)


@pytest.mark.sampled
def test_kernels_use_as_many_threads_as_torch_does_now():
    python(
        """
        import torch
        from pellucid.native import timeline
        run = torch.compile(lambda x: (x * 2).sin(), backend="pellucid")
        x = torch.randn(1_000_000)
        for threads in (1, 4, 2):
            torch.set_num_threads(threads)
            run(x)
            timeline.start()
            run(x)
            (taken,) = timeline.stop()
            (call,) = taken.calls
            assert len({share.thread for share in call.shares}) == (threads if threads > 1 else 0), (threads, call)
        """
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_NUM_THREADS": "1"},
        pytest.param({"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de"}, marks=pytest.mark.slow),
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LD_PRELOAD": "libjemalloc.so.2"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_environments(environment, tmp_path):
    if "LD_PRELOAD" in environment and not any(Path("/usr/lib").glob("*/libjemalloc.so.2")):
        pytest.skip("jemalloc is not installed")
    store = str(tmp_path / "Lager mit ä, 核 und 'x'")
    assert python(SAME, PELLUCID_CACHE_DIR=store, **environment).out == "good\n"


@pytest.mark.slow
def test_a_deleted_current_directory_does_not_matter(tmp_path):
    """Eager and Dynamo go first: afterwards neither oneMKL can be loaded any more nor `torch._dynamo` imported."""
    python(
        """
        import os, sys, torch
        def function(x):
            return torch.softmax(x * 2 + 1, -1), x.amax(1).exp()
        x = torch.randn(9, 33)
        expected, run = function(x), torch.compile(function, backend="pellucid")
        os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])
        for ours, theirs in zip(run(x), expected):
            torch.testing.assert_close(ours, theirs)
        """,
        tmp_path / "gone",
        PELLUCID_CACHE_DIR=str(tmp_path / "store"),
    )


# ------------------------------------------------------------------------------------------ interruptions

SLOW = """
    import os, signal, sys, threading, time, torch
    from pathlib import Path
    folder = Path(sys.argv[1])
    def function(x):
        return torch.softmax(x * 2 + 1, -1)
    def compile():
        return torch.compile(function, backend="pellucid")(torch.ones(3, 4))
"""
HANGS = 'case "$*" in *" -c "*kernels.o*) sleep 1000 & echo $! > {0}/pid; touch {0}/started; wait;; esac\n'


def hanging(tmp_path: Path) -> dict[str, str]:
    """An environment whose compiler hangs at kernels."""
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\n" + HANGS.format(tmp_path) + 'exec g++ "$@"\n')
    fake.chmod(0o755)
    return {"CXX": str(fake), "PELLUCID_CACHE_DIR": str(tmp_path / "store")}


def started(tmp_path: Path) -> None:
    for _ in range(12_000):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            return
        time.sleep(0.02)
    raise AssertionError("the compiler was never started")


def gone(pid: int) -> bool:
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.sampled
def test_ctrl_c_during_compilation_ends_it_at_once(tmp_path):
    code = SLOW + "    compile()\n"
    process = python(code, tmp_path, wait=False, **hanging(tmp_path))
    started(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err and process.returncode != 0
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_process_that_exits_does_not_wait_for_its_compilers(tmp_path):
    # The thread builds by itself: inside of torch.compile stand frames of C++ that abort when Python ends their thread.
    code = SLOW + (
        "    from pellucid.native.build import build\n"
        "    source = 'extern \"C\" int64_t k(void* const*, const int64_t*, int64_t, int64_t) { return 0; }'\n"
        "    threading.Thread(target=build, args=({'k': source},), daemon=True).start()\n"
        "    while not (folder / 'started').exists():\n"
        "        time.sleep(0.01)\n"
        "    print('bye', flush=True)\n"
    )
    process = python(code, tmp_path, **hanging(tmp_path))
    assert process.out == "bye\n" and gone(int((tmp_path / "pid").read_text()))


@pytest.mark.sampled
def test_a_process_that_exits_does_not_wait_for_what_is_built_in_the_background(tmp_path):
    """Nor does its first call: the compiler hangs."""
    code = SLOW + (
        "    run, x = torch.compile(function, backend='pellucid', options={'background': True}), torch.ones(3, 4)\n"
        "    while not (folder / 'started').exists():\n"
        "        torch.testing.assert_close(run(x), function(x))\n"
        "    print('bye', flush=True)\n"
    )
    process = python(code, tmp_path, **hanging(tmp_path))
    assert process.out == "bye\n" and not process.err and gone(int((tmp_path / "pid").read_text()))


def test_an_interrupt_during_a_run_comes_after_it_and_does_no_harm() -> None:
    run, x = compiled(lambda x: (x.sin() * 2).cos()), torch.randn(1 << 20)
    expected, came = run(x).clone(), 0
    for _ in range(20):
        timer = threading.Timer(0.005, signal.raise_signal, (signal.SIGINT,))
        try:
            timer.start()
            for _ in range(2_000):
                run(x)
        except KeyboardInterrupt:
            came += 1
        timer.join()
        assert torch.equal(run(x), expected)
    assert came >= 15  # Python drops those that come while it destroys an object


# ------------------------------------------------------------------------------------------ errors of a run

TABLE = torch.randn(50, 16)
GOOD = torch.randint(0, 50, (8,))
HIGH, LOW = torch.tensor([3, 50, 1]), torch.tensor([3, -51, 1])
ROWS = torch.randn(3, 50)


def backward(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index].sin() * 2


@pytest.mark.sampled
@pytest.mark.parametrize("index", [HIGH, LOW], ids=["high", "low"])
@pytest.mark.parametrize(
    ("function", "dim"),
    [
        (lambda i: F.embedding(i, TABLE) * 2, 0),
        (lambda i: TABLE[i].sin(), 0),
        (lambda i: TABLE[:, 0][i] + 1, 0),
        (lambda i: ROWS[:, :50].gather(1, i[: len(ROWS), None]) + 1, 1),
        (lambda i: TABLE.index_select(0, i) * 3, 0),
        (lambda i: torch.zeros(50).index_put((i,), torch.tensor(1.0)) * 2, 0),
        (lambda i: torch.zeros(3, 50).scatter(1, i[:3, None], 1.0) * 2, 1),
        (lambda i: F.cross_entropy(ROWS, i[:3]), 1),
        (lambda i: TABLE[i.repeat(20_000)].sum(1), 0),
    ],
    ids="embedding index index_1d gather index_select index_put scatter cross_entropy threads".split(),
)
def test_an_index_out_of_range_is_an_error_with_its_value_and_the_line(function, dim, index) -> None:
    run = compiled(function)
    good, value = GOOD[:3], int(index[1])
    assert torch.allclose(run(good), function(good))
    with pytest.raises(
        IndexError,
        match=rf"index {value} is out of bounds for dimension {dim} with size 50, in \w+ at .*test_real_world\.py:\d+",
    ):
        run(index)
    assert torch.allclose(run(good), function(good))


def test_an_index_out_of_range_under_autograd() -> None:
    table = TABLE.clone().requires_grad_()
    run = compiled(backward)
    message = r"index 50 is out of bounds for dimension 0 with size 50, in .*test_real_world\.py:\d+"
    with pytest.raises(IndexError, match=message):
        run(table, HIGH)
    run(table, GOOD).sum().backward()
    expected = TABLE.clone().requires_grad_()
    backward(expected, GOOD).sum().backward()
    torch.testing.assert_close(table.grad, expected.grad)


def test_no_memory_for_a_result_names_the_kernel() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    run = torch.compile(function, backend="pellucid", dynamic=True)
    torch.testing.assert_close(run(torch.ones(5)), function(torch.ones(5)))
    huge = torch.ones(1).expand(1 << 46)
    with pytest.raises(MemoryError, match=r"cannot allocate \d+ bytes for a result(.|\n)*test_real_world\.py:\d+"):
        torch.compile(lambda x: x.exp() + 1, backend="pellucid")(huge)
    torch.testing.assert_close(run(torch.ones(7)), function(torch.ones(7)))
    pool_trim()


def test_no_memory_for_temporaries_is_a_memory_error() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return (y / y.sum()).sort().values[:1]

    with pytest.raises(MemoryError, match=r"cannot allocate \d+ bytes for the temporaries"):
        compiled(function)(torch.ones(1).expand(1 << 46))


# ------------------------------------------------------------------------------------------ determinism


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_what_eager_refuses_to_do_deterministically_is_refused(deterministic) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.clone().put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0])) + 1

    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        function(torch.ones(4))
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        compiled(function)(torch.ones(4))


def test_uninitialized_memory_is_filled_as_in_eager(deterministic) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.empty(5), torch.empty_like(x), x.new_empty(3, dtype=torch.int64)

    x = torch.ones(2, 2)
    for ours, theirs in zip(compiled(function)(x), function(x), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_results_do_not_depend_on_chance() -> None:
    """Sums over shared places come out the same, run after run, with several threads."""
    index = torch.randint(0, 7, (100_000,))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.zeros(7).index_add(0, index, x), torch.zeros(7).scatter_add(0, index, x), x.sum(), x.cumsum(0)

    run, x, before = compiled(function), torch.randn(100_000), torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        first = [result.clone() for result in run(x)]
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(run(x), first, strict=True))
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------ options and versions


def test_a_variable_that_means_nothing_is_named(monkeypatch) -> None:
    monkeypatch.setenv("PELLUCID_VECTORISE", "1")
    check_environment.cache_clear()
    with pytest.warns(UserWarning, match="PELLUCID_VECTORISE means nothing.*did you mean PELLUCID_VECTORIZE") as caught:
        make_options()
    assert caught[0].filename == __file__
    monkeypatch.setenv("PELLUCID_BACKEND", "1")
    check_environment.cache_clear()
    with pytest.warns(UserWarning, match="PELLUCID_BACKEND means nothing to Pellucid: known are PELLUCID_TRACE, "):
        make_options()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_options()  # said once
    check_environment.cache_clear()


def test_a_value_of_the_wrong_type_in_the_environment_is_named(monkeypatch) -> None:
    monkeypatch.setenv("PELLUCID_MAX_FUSED_LINES", "many")
    with pytest.raises(UserError, match="PELLUCID_MAX_FUSED_LINES cannot be 'many'"):
        make_options()


@pytest.mark.parametrize(
    ("version", "message"), [("1.13.1+cpu", "needs PyTorch 2.13; this is 1.13.1"), (None, "which is not installed")]
)
def test_an_unfit_torch_is_refused(monkeypatch, version, message) -> None:
    monkeypatch.setattr(support, "_torch_version", lambda: version)
    with pytest.raises(UnsupportedError, match=message) as error:
        support.check_versions()
    assert "pip install" in error.value.hint


def test_a_newer_torch_is_warned_of_and_builds_of_ours_are_not(monkeypatch) -> None:
    monkeypatch.setattr(support, "_torch_version", lambda: "2.14.0.dev20260101+cu130")
    with pytest.warns(UserWarning, match=r"made for PyTorch 2\.13 and this is 2\.14"):
        support.check_versions()
    monkeypatch.setattr(support, "_torch_version", lambda: "2.13.1+cu130")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        support.check_versions()


def test_an_old_python_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(support.sys, "version_info", (3, 8, 1))
    with pytest.raises(UnsupportedError, match=r"needs Python 3\.10 or later; this is 3\.8\.1"):
        support.check_versions()


def test_the_warning_of_a_read_only_store_points_at_the_user(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(children_module, "usable_cores", lambda: 1)
    store = KernelStore("key", tmp_path / "store")
    with pytest.warns(UserWarning, match="stores the kernels that it builds") as caught:
        store.out_of_space(store.directory)
    assert caught[0].filename == __file__
    assert shutil.which("g++") and build({}, store=store)[0] == {}
