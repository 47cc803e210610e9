"""A store that is carried to another folder, and one that many processes use, fill and trim at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import sys, torch
    from pellucid import backend
    torch.set_num_threads(1)

    def function(x, w):
        return ((x @ w) * int(sys.argv[1])).softmax(-1)

    torch.manual_seed(0)
    x, w = torch.randn(9, 8), torch.randn(8, 7, requires_grad=True)
    y = torch.compile(function, backend="pellucid", options={"reuse": True})(x, w)
    (ours,) = torch.autograd.grad(y[:, 0].sum(), w)
    (theirs,) = torch.autograd.grad(function(x, w)[:, 0].sum(), w)
    torch.testing.assert_close(ours, theirs)
    print([start.outcome for start in backend.last_starts()])
"""

# Nothing is traced, lowered or built: not even the header and the runtime.
FORBID = """
    from pellucid import backend
    from pellucid.native.compiler import Compiler

    def fail(*args, **kwargs):
        print("it compiles again", file=sys.stderr)
        os._exit(3)

    import os, sys
    backend.capture_with_aot = backend.compile_graph = Compiler.run = fail
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("program") / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    return file


def begin(store: Path, *command: str | Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PELLUCID_CACHE_DIR": str(store)}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(store: Path, *command: str | Path) -> str:
    process = begin(store, *command)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out.strip()


def cache(store: Path, *words: str | Path) -> dict:
    return json.loads(run(store, "-m", "pellucid", "cache", *words, "--json"))


@pytest.fixture(scope="module")
def exported(program: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """What a process compiled, as an archive, and what `pellucid cache export` said of it."""
    folder = tmp_path_factory.mktemp("exported")
    assert run(folder / "store", program, "3") == "['missed']"
    archive = folder / "warm.tar.gz"
    return archive, cache(folder / "store", "export", archive)


def kept(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.glob("v1-*/**/*") if path.is_file()}


@pytest.mark.sampled
def test_an_imported_store_starts_warm(program: Path, exported: tuple[Path, dict], tmp_path: Path) -> None:
    """The second process runs in another folder, on what the first one compiled, and builds and lowers nothing."""
    archive, said = exported
    assert {each["kind"] for each in said["moved"]} == {"program", "kernels", "file"}
    imported = cache(tmp_path / "b", "import", archive)
    assert len(imported["moved"]) == len(said["moved"]) and not imported["left_out"]
    verified = cache(tmp_path / "b", "verify")
    assert verified["checked"] == len(imported["moved"]) and verified["good"] and not verified["unused"]
    strict = tmp_path / "strict.py"
    strict.write_text(
        textwrap.dedent(FORBID) + f"exec(compile(open({str(program)!r}).read(), {str(program)!r}, 'exec'))"
    )
    before = kept(tmp_path / "b")
    assert run(tmp_path / "b", strict, "3") == "['found']"
    assert kept(tmp_path / "b") == before
    (listed,) = (each for each in cache(tmp_path / "b", "list")["items"] if each["kind"] == "program")
    assert listed["line"] == f"{program}:7" and listed["threads"] == 1
    assert [graph["kind"] for graph in listed["graphs"]] == ["forward", "backward"]


@pytest.mark.sampled
def test_an_archive_is_refused_where_the_compilers_flags_are_others(
    exported: tuple[Path, dict], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pellucid", "cache", "import", str(exported[0])]
    environment = {**os.environ, "PELLUCID_CACHE_DIR": str(tmp_path / "b"), "PELLUCID_CXXFLAGS": "-O1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 255 and done.stdout == ""
    assert "is not for this machine" in done.stderr and "the compiler's flags: here with -O1" in done.stderr
    assert not (tmp_path / "b").exists() or not list((tmp_path / "b").glob("v1-*"))


@pytest.mark.slow  # each of them may have to make the header and the runtime again
def test_twenty_processes_that_import_trim_check_and_compile(
    program: Path, exported: tuple[Path, dict], tmp_path: Path
) -> None:
    """Whatever goes away under a process is missing, and built again; what it computes is right."""
    store, (archive, _) = tmp_path / "store", exported
    cache(store, "import", archive)
    commands: list[tuple[str | Path, ...]] = []
    for number in range(5):
        commands += [
            (program, "3"),
            (program, str(number + 10)),
            ("-m", "pellucid", "cache", "import", archive),
            ("-m", "pellucid", "cache", "trim", "--size", "0") if number % 2 else ("-m", "pellucid", "cache", "verify"),
        ]
    processes = [begin(store, *command) for command in commands]
    for command, process in zip(commands, processes, strict=True):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, (command, out, err)
    cache(store, "import", archive)
    assert cache(store, "verify")["good"]
    assert run(store, program, "3") == "['found']"
