"""Which machine the compiler asks: a file, what was measured here, or the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.errors import UserError
from pellucid.machine import AVX2, REFERENCES
from pellucid.machine.model import Machine, to_text
from pellucid.machine.reference import with_tiles
from pellucid.native import machine as native_machine
from pellucid.native.machine import keep, machine_file, machine_for, measured
from pellucid.native.measure import _held


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PELLUCID_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def other() -> Machine:
    return replace(AVX2, name="other", barrier=12_340.0, spread={"barrier": 0.5})


def test_without_measurements_it_is_the_reference(root: Path) -> None:
    machine = machine_for("reference")
    reference = REFERENCES[machine.isa.name]
    assert machine.figures == (with_tiles(reference) if machine.isa.tiles else reference).figures
    assert measured() is None and not root.exists(), "compiling measures nothing"


@pytest.mark.parametrize("cores", [1, 2, 12])
def test_without_measurements_it_has_the_cores_that_are_here(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_machine, "usable_cores", lambda: cores)
    machine = machine_for()
    assert machine.cores == cores and machine_for("reference").cores == 2
    assert machine.flops.f32.all == pytest.approx(cores * machine.flops.f32.one, rel=0.3)


def test_what_was_measured_is_asked_rounded() -> None:
    machine_for()
    keep(other())
    assert measured() == other() and measured().spread == other().spread  # type: ignore[union-attr]
    assert machine_for().barrier == 12_600, "the next of ten steps to the power of ten"
    assert machine_for("reference").barrier == AVX2.barrier


def test_measuring_again_keeps_what_is_nearly_the_same() -> None:
    keep(other())
    keep(replace(other(), barrier=13_000.0, call=500.0))
    assert measured() == replace(other(), call=500.0)


def test_a_file_wins(tmp_path: Path) -> None:
    keep(other())
    path = tmp_path / "machine.json"
    path.write_text(to_text(replace(AVX2, page=31_600.0)))
    assert machine_for(str(path)).page == 31_600 and machine_for(str(path)).barrier == AVX2.barrier


@pytest.mark.parametrize("text", [None, "{}", "\x00\xff"])
def test_a_file_that_is_no_machine_is_an_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"machine\.json"):
        machine_for(str(path))


def test_a_damaged_file_of_the_store_is_told_and_left_aside(root: Path) -> None:
    keep(other())
    machine_file().write_text("{")
    machine_for.__globals__["_machine_for"].cache_clear()
    with pytest.warns(UserWarning, match="describes no machine"):
        assert machine_for().barrier == AVX2.barrier
    with pytest.warns(UserWarning, match="describes no machine"):
        keep(other())
    assert measured() == other(), "measuring again mends it"


def test_the_last_cache_is_measured_with_what_leaves_the_nearer_ones_and_little_more() -> None:
    """Half of a cache that others use too may come from memory."""
    caches = {"l1": 32 << 10, "l2": 1 << 20, "l3": 256 << 20}
    assert _held(caches, 2) == {"l1": 16 << 10, "l2": 512 << 10, "l3": 8 << 20}
    assert _held({"l2": 1 << 20, "l3": 4 << 20}, 2)["l3"] == 2 << 20
