from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pellucid.errors import ToolchainError, UnsupportedError
from pellucid.native import toolchain
from pellucid.native.cpu import Cpu, cpu
from pellucid.native.toolchain import choose_isa, detect


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in ("CXX", "PELLUCID_CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    detect.cache_clear()
    yield
    detect.cache_clear()


def fake_compiler(path: Path, macros: str, log: Path | None = None) -> Path:
    """A program that answers the version probe with `macros`."""
    note = f"echo called >> {log}\n" if log else ""
    path.write_text(f"#!/bin/sh\n{note}cat > /dev/null\necho '{macros}'\n")
    path.chmod(0o755)
    return path


def test_detects_the_compiler_of_this_machine():
    found = detect()
    assert found.kind in ("gcc", "clang") and int(found.version.split(".")[0]) >= 12
    assert found.isa in ("AVX512", "AVX2") and Path(found.compiler[0]).is_absolute()
    assert "-ffast-math" not in found.flags and "-ffp-contract=off" in found.flags
    assert detect() is found


def test_no_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler found") as error:
        detect()
    assert "apt-get install g++" in error.value.hint and "dnf install gcc-c++" in error.value.hint


def test_cxx_is_honoured(monkeypatch, tmp_path):
    path = fake_compiler(tmp_path / "my-g++", "__clang_major__ __clang_minor__ 13 2 1")
    monkeypatch.setenv("CXX", str(path))
    found = detect()
    assert found.compiler == (str(path),) and (found.kind, found.version) == ("gcc", "13.2.1")
    detect.cache_clear()
    monkeypatch.setenv("CXX", f"{path} -m64")
    assert detect().compiler == (str(path), "-m64")
    detect.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="CXX names 'no-such-compiler'"):
        detect()


@pytest.mark.parametrize(
    ("macros", "message"),
    [
        ("__clang_major__ __clang_minor__ 9 4 0", "is gcc 9.4.0; Pellucid needs GCC 12"),
        ("11 0 4 2 1", "is clang 11.0; Pellucid needs GCC 12 or Clang 14"),
        ("a b c d e", "is neither GCC nor Clang"),
        ("hello", "does not work as a C\\+\\+ compiler"),
    ],
)
def test_unfit_compilers_are_refused(monkeypatch, tmp_path, macros, message):
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "cxx", macros)))
    with pytest.raises(ToolchainError, match=message) as error:
        detect()
    assert "apt-get install g++" in error.value.hint


def test_the_version_is_asked_once_until_the_compiler_changes(monkeypatch, tmp_path):
    log, cache = tmp_path / "log", tmp_path / "cache" / "compilers.json"
    path = fake_compiler(tmp_path / "cxx", "x x 12 1 0", log)
    monkeypatch.setenv("CXX", str(path))
    first = detect(cache.parent)
    detect.cache_clear()
    assert detect(cache.parent) == first and log.read_text() == "called\n"
    detect.cache_clear()
    fake_compiler(path, "x x 14 10 0", log)
    os.utime(path, ns=(1, 1))
    assert detect(cache.parent).version == "14.10.0" and detect(cache.parent).key != first.key
    detect.cache_clear()
    cache.write_text("{half a file")
    assert detect(cache.parent).version == "14.10.0"


def test_the_key_covers_flags_and_cpu(monkeypatch):
    key = detect().key
    detect.cache_clear()
    monkeypatch.setenv("PELLUCID_CXXFLAGS", "-g1")
    assert "-g1" in detect().flags and detect().key != key
    detect.cache_clear()
    monkeypatch.delenv("PELLUCID_CXXFLAGS")
    other = cpu()
    monkeypatch.setattr(
        toolchain,
        "cpu",
        lambda: Cpu("another", other.machine, other.flags, 1, 1, 0, 0, 0),
    )
    assert detect().key != key


def machine(*flags: str) -> Cpu:
    return Cpu("test", "x86_64", frozenset(flags), 1, 1, 0, 0, 0)


def test_instruction_set_follows_the_cpu_and_torch():
    avx2 = ("avx2", "fma", "f16c")
    avx512 = (*avx2, "avx512f", "avx512dq", "avx512vl", "avx512bw")
    assert choose_isa(machine(*avx512), "AVX512") == "AVX512"
    assert choose_isa(machine(*avx512), "AVX2") == "AVX2", "ATEN_CPU_CAPABILITY=avx2"
    assert choose_isa(machine(*avx2), "AVX2") == "AVX2"
    with pytest.raises(UnsupportedError, match="it lacks avx2"):
        choose_isa(machine("fma", "f16c", "sse4_2"), "DEFAULT")


def test_facts_about_the_cpu():
    facts = cpu()
    assert 1 <= facts.cores <= (os.cpu_count() or 1) and facts.memory > 1 << 28
    assert facts.name and facts.flags and facts is cpu()
    assert stat.S_ISREG(os.stat("/proc/cpuinfo").st_mode)
