"""`pellucid doctor`: planted faults are named, and a healthy process hears nothing of the kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pellucid.kit.debug import doctor as module
from pellucid.kit.debug.doctor import BAD, GOOD, WARNING, Check, Doctored, doctor, openmp_runtimes
from pellucid.kit.show import shown
from pellucid.machine import AVX2
from pellucid.machine.model import from_text
from pellucid.native.build import default_toolchain
from pellucid.native.machine import machine_for, measured
from pellucid.native.measure import Measured
from pellucid.printing import plain


@pytest.fixture(autouse=True)
def measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """What measuring gives, each taken once; the machine is not measured."""
    made = [Measured(replace(AVX2, name="one", spread={"barrier": 0.01}), 0.0)]
    monkeypatch.setattr(module, "measure", lambda: made.pop(0))
    monkeypatch.setattr(module, "machine_file", lambda: tmp_path / "machine.json")
    monkeypatch.setenv("PELLUCID_CACHE_DIR", os.environ.get("PELLUCID_CACHE_DIR", str(tmp_path)))
    monkeypatch.setattr("pellucid.native.machine.machine_file", lambda: tmp_path / "machine.json")
    monkeypatch.delenv("PELLUCID_MACHINE", raising=False)
    return made


def check(found: Doctored, name: str) -> Check:
    return next(each for each in found.checks if each.name == name)


def test_the_machine_is_measured_once_and_kept(measures: list[Measured]) -> None:
    assert check(doctor(), "machine").verdict == GOOD
    assert measured() is not None and not measures
    doctor()
    measures.append(Measured(replace(AVX2, page=50_100.0, spread={"barrier": 0.01}), 0.0))
    assert doctor(remeasure=True).machine.page == 50_100  # type: ignore[union-attr]
    assert machine_for().page == 50_100 and machine_for("reference").page == AVX2.page


def test_disturbed_measurements_are_shown_and_not_kept(measures: list[Measured]) -> None:
    measures[:] = [Measured(replace(AVX2, spread={"barrier": 0.01}), 0.3)]
    found = doctor()
    assert check(found, "machine").verdict == WARNING and "--remeasure" in check(found, "machine").remedy
    assert found.machine is not None and measured() is None and found.good


def test_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(module, "_physical_cores", lambda: 4)
    found = check(doctor(), "threads")
    assert found.verdict == WARNING and found.remedy == "OMP_NUM_THREADS=4"


def test_a_limit_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = check(doctor(), "container")
    assert found.verdict == WARNING and "OMP_NUM_THREADS=1" in found.remedy
    monkeypatch.setattr(module, "cpu_quota", lambda: None)
    assert check(doctor(), "container").verdict == GOOD


def test_flushed_denormals_are_told() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert "flushed" in check(doctor(), "denormals").found
    finally:
        torch.set_flush_denormal(False)
    assert "IEEE 754" in check(doctor(), "denormals").found


def test_slow_denormals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_product_seconds", lambda value: 1.0 if value == 1.0 else 100.0)
    assert check(doctor(), "denormals").verdict == WARNING


def test_no_compiler_is_bad_and_the_rest_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from pellucid.errors import ToolchainError

    def nothing() -> None:
        raise ToolchainError("no C++ compiler found", hint="apt-get install g++")

    monkeypatch.setattr(module, "default_toolchain", nothing)
    monkeypatch.setattr(module, "measure", nothing)
    found = doctor()
    assert not found.good and found.checks[0] == Check("toolchain", BAD, "no C++ compiler found", "apt-get install g++")
    assert found.machine is None and check(found, "threads")


@pytest.mark.parametrize(
    ("runtime", "micro_kernels", "flags", "told", "remedy"),
    [
        (True, True, "", "includes the prebuilt runtime and micro-kernels", ""),
        (True, False, "", "does not include micro-kernels", "reinstall Pellucid"),
        (False, False, "", "does not include the runtime and micro-kernels", "reinstall Pellucid"),
        (True, False, "-O1", "built without PELLUCID_CXXFLAGS", "unset PELLUCID_CXXFLAGS"),
    ],
)
def test_native_code_that_did_not_come_with_the_package(
    monkeypatch: pytest.MonkeyPatch, runtime: bool, micro_kernels: bool, flags: str, told: str, remedy: str
) -> None:
    monkeypatch.setattr(module, "came_with_package", lambda: runtime)
    monkeypatch.setattr(module, "shipped", lambda _: Path("shared.o") if micro_kernels else None)
    monkeypatch.setenv("PELLUCID_CXXFLAGS", flags)
    found = check(doctor(), "package")
    assert found.verdict == (GOOD if runtime and micro_kernels else WARNING)
    assert told in found.found and remedy in found.remedy


@pytest.mark.sampled
def test_two_openmp_runtimes_in_one_process(tmp_path: Path) -> None:
    """An empty library with the name of one that other packages bring."""
    assert len(openmp_runtimes()) == 1
    second = tmp_path / "libiomp5.so"
    compiler = default_toolchain().compiler
    subprocess.run([*compiler, "-shared", "-nostdlib", "-x", "c++", os.devnull, "-o", str(second)], check=True)
    program = "from pellucid.kit.debug.doctor import _openmp; found = _openmp(); print(found.verdict, found.found)"
    done = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(second)!r}); {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{BAD} 2 runtimes") and str(second) in done.stdout


def test_what_is_printed(measures: list[Measured]) -> None:
    text = plain(shown(doctor()))
    assert "memory.read" in text and "GB/s" in text and "OpenMP" not in text.split("\n")[0]
    lines = text.splitlines()
    verdicts = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in (BAD, WARNING, GOOD)]
    assert verdicts == sorted(verdicts, key=(BAD, WARNING, GOOD).index)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from pellucid.cli import main

    file = tmp_path / "here.json"
    done = CliRunner().invoke(main, ["doctor", "--json", "-o", str(file)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert all(each.keys() == {"name", "verdict", "found", "remedy", "settings"} for each in said["checks"])
    assert said["machine"]["figures"]["barrier"] == AVX2.barrier
    assert from_text(file.read_text(), "file") == replace(AVX2, name="one")


def test_a_machine_that_cannot_be_read_is_bad(
    tmp_path: Path, measures: list[Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PELLUCID_MACHINE names what the compiler asks: with such a file it compiles nothing."""
    doctor()
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for file in (broken, tmp_path / "missing.json"):
        monkeypatch.setenv("PELLUCID_MACHINE", str(file))
        found = doctor()
        said = check(found, "machine")
        assert said.verdict == BAD and str(file) in said.found and "unset PELLUCID_MACHINE" in said.remedy
        assert not found.good
