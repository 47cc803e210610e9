"""`pellucid cache`: what it prints and exits with, on stores made by hand."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pellucid.cli import main
from pellucid.cli.exits import Exit
from pellucid.kit.debug.cache import listed, sizes, trimmed, verified
from pellucid.native.build import default_store
from pellucid.native.store import KernelStore
from pellucid.reuse import _versions
from tests.kit.test_show import terminal


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store with a program, a library and a header that this machine would use."""
    monkeypatch.setenv("PELLUCID_CACHE_DIR", str(tmp_path / "store"))
    store = default_store()
    with store.workspace() as work:
        (work / "k.so").write_bytes(b"library" * 100)
        store.add({f"k_gelu_sum_{n}": f"text {n}" for n in range(4)}, work / "k.so", "// source")
        (work / "made").write_bytes(b"header")
        store.add_file("prelude.h", work / "made")
    graphs = [{"kind": "forward", "nodes": 12, "kernels": 3}, {"kind": "backward", "nodes": 20, "kernels": 5}]
    about = {"line": "/a/long/way/to/the/models/of/somebody/modeling_mobilebert.py:1038", "threads": 2}
    store.add_program("a" * 40, b"pickled", {**about, "graphs": graphs, "versions": _versions()})
    yield store.directory


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["cache", *map(str, words)])


def as_json(*words: str | Path) -> dict[str, Any]:
    return json.loads(run(*words, "--json").stdout)


def test_the_list_says_what_graphs_and_kernels_there_are(root: Path) -> None:
    result = run("list")
    assert result.exit_code == Exit.GOOD
    assert "modeling_mobilebert.py:1038" in result.stdout and "k_gelu_sum_0" in result.stdout
    assert "forward: 12 calls, 3 kernels; backward: 20 calls, 5 kernels; 2 threads" in result.stdout
    assert "prelude.h" in result.stdout and f"{root.name}" in result.stdout and "used here" in result.stdout
    kinds = [each["kind"] for each in as_json("list")["items"]]
    assert sorted(kinds) == ["file", "kernels", "program"]


def test_trials_are_listed_with_the_fastest(root: Path) -> None:
    store = default_store()
    store.add_trial("b" * 40, b'{"kernels": ["k_sum_1", "k_sum_2"], "fastest": "k_sum_2", "ns": [20, 10], "pairs": 3}')
    store.add_trial("c" * 40, b"damaged")
    whole, damaged = sorted(
        (each for each in as_json("list")["items"] if each["kind"] == "trial"), key=lambda e: e["name"]
    )
    assert whole["kernels"] == ["k_sum_2", "k_sum_1"] and damaged["kernels"] == []
    assert "k_sum_2 of 2" in run("list").stdout and "2 trials" in run("size").stdout
    assert as_json("size")["kernels"] == 4, "those of libraries"
    assert [each["name"] for each in as_json("verify")["bad"]] == ["c" * 40]


def test_sizes_add_up(root: Path) -> None:
    found = as_json("size")
    assert found["size"] == sum(found["sizes"].values()) == found["keys"][0]["size"]
    assert found["counts"] == {"program": 1, "kernels": 1, "file": 1} and found["kernels"] == 4
    assert "1 library of 4 kernels" in run("size").stdout


def test_a_whole_store_is_good(root: Path) -> None:
    result = run("verify")
    assert result.exit_code == Exit.GOOD and "all 3 entries are intact" in result.stdout


def test_a_damaged_entry_is_told_and_removed_when_asked(root: Path) -> None:
    (program,) = (root / "programs").iterdir()
    program.write_bytes(program.read_bytes()[:-2])
    (root / "batches" / ".half.so.1.2").write_bytes(b"half")
    os.utime(root / "batches" / ".half.so.1.2", (1, 1))
    result = run("verify")
    assert result.exit_code == Exit.BAD and "2 of 4 entries are bad" in result.stdout
    assert "it has 5 of 7 bytes" in result.stdout and "half-written" in result.stdout
    result = run("verify", "--remove")
    assert result.exit_code == Exit.GOOD and not program.exists()
    assert run("verify").exit_code == Exit.GOOD


def test_what_others_can_write_is_bad(root: Path) -> None:
    (root / "programs").chmod(0o777)
    found = as_json("verify")
    assert run("verify").exit_code == Exit.BAD and "can be written by other users" in found["unsafe"][0]
    (root / "programs").chmod(0o700)
    if os.geteuid() == 0:
        (program,) = (root / "programs").iterdir()
        os.chown(program, 12345, -1)
        assert "belongs to another user (uid 12345)" in as_json("verify")["bad"][0]["problem"]


def test_what_other_versions_and_machines_left_is_told_with_the_difference(root: Path) -> None:
    store = KernelStore("v1-" + "0" * 16 + "-" + root.name[-12:], root.parent)
    (store.directory / "toolchain.json").write_text((root / "toolchain.json").read_text())
    with store.workspace() as work:
        (work / "k.so").write_bytes(b"library")
        store.add({"k": "text"}, work / "k.so", "// source")
    old = {**_versions(), "PyTorch": "1.13"}
    default_store().add_program("b" * 40, b"pickled", {"line": "a.py:1", "graphs": [], "versions": old})
    result = run("verify")
    assert result.exit_code == Exit.GOOD and "2 are intact but not used here" in result.stdout
    assert "another version of PyTorch (1.13; here it is" in result.stdout
    assert "does not yield its name" in result.stdout
    assert "not used here: what it says it was built for does not yield its name" in run("list").stdout


def test_the_archive_is_made_and_taken(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("export", tmp_path / "warm.tar.gz")
    assert result.exit_code == Exit.GOOD and "1 graph, 1 library, 1 file" in result.stdout
    monkeypatch.setenv("PELLUCID_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    result = run("import", tmp_path / "warm.tar.gz")
    assert result.exit_code == Exit.GOOD and "1 graph, 1 library, 1 file" in result.stdout
    assert "compiled for 2 threads" in result.stdout
    assert "already present: 1 graph, 1 library, 1 file" in run("import", tmp_path / "warm.tar.gz").stdout


def test_trimming(root: Path) -> None:
    (program,) = (root / "programs").iterdir()
    os.utime(program, (time.time() - 40 * 86400,) * 2)
    assert "would be removed: 1 graph" in run("trim", "--older", "30d", "--dry-run").stdout and program.exists()
    assert "removed: 1 graph" in run("trim", "--older", "30d").stdout and not program.exists()
    assert "removed: nothing" in run("trim", "--older", "30d").stdout
    assert "removed: 1 library" in run("trim", "--size", "100").stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["trim"], "specify what to remove: --older AGE, --size SIZE or both"),
        (["trim", "--older", "long"], "'long' is not a valid age: give 30d or 12h (units: s, min, h, d, w)"),
        (["trim", "--older", "-1d"], "is not a valid age"),
        (["trim", "--size", "2 elephants"], "is not a valid size: give 500MB or 2GB"),
        (["import", "no.tar.gz"], "'no.tar.gz' does not exist"),
        (["import", "/tmp"], "is a directory"),
        (["export", "/no-dir/a.tar.gz"], "there is no folder /no-dir; create it first"),
        (["export", "/proc/a.tar.gz"], "cannot write to /proc/a.tar.gz"),
        (["lst"], "No such command 'lst'"),
        (["import"], "For example:\n  pellucid cache import warm.tar.gz"),
    ],
)
def test_a_wrong_call_says_what_would_be_right(root: Path, words: list[str], complaint: str) -> None:
    result = run(*words)
    assert result.exit_code == Exit.FAILED and complaint in result.stderr and result.stdout == ""


def test_an_archive_that_is_none_is_a_clear_error(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_text("no archive")
    (tmp_path / "a.tar.gz").chmod(0o644)
    result = run("import", tmp_path / "a.tar.gz")
    assert result.exit_code == Exit.FAILED and "is damaged, or not whole" in result.stderr


@pytest.mark.parametrize("command", ["list", "size", "verify"])
def test_a_store_that_is_a_file_is_a_clear_error(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PELLUCID_CACHE_DIR", str(tmp_path / "file"))
    result = run(command)
    assert result.exit_code == Exit.FAILED and "cannot be read: Not a directory" in result.stderr


def test_without_a_store_nothing_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_CACHE_DIR", str(tmp_path / "none"))
    assert "there is no store yet" in run("list").stdout
    for words in (["list"], ["size"], ["verify"], ["trim", "--size", "0"]):
        assert run(*words).exit_code == Exit.GOOD
    assert not (tmp_path / "none").exists()
    assert "there is nothing to export" in run("export", tmp_path / "a.tar.gz").stderr


def test_in_a_terminal_no_sentence_is_wider_than_that(root: Path) -> None:
    (root / "kernels" / "k_gelu_sum_0").write_text("{")
    for found in (listed(), sizes(), verified(), trimmed(None, 1 << 40)):
        assert all(len(line) <= 80 or str(root.parent) in line for line in terminal(found)), terminal(found)


def test_many_rows_are_counted(root: Path) -> None:
    for number in range(15):
        default_store().add_program(f"{number:040x}", b"x", {"line": f"a.py:{number}", "graphs": [], "threads": 1})
    assert "and 6 graphs more" in run("list").stdout
    assert len(as_json("list")["items"]) == 18
