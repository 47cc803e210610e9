"""The machine as a value: its figures, their rounding, and its file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pellucid.errors import UserError
from pellucid.machine import AVX2, AVX512, Machine, Rate, rounded, steadied
from pellucid.machine.model import WAYS, from_text, to_text, with_cores


def scaled(machine: Machine, factor: float) -> Machine:
    about = json.loads(to_text(machine))
    about["figures"] = {name: value * factor for name, value in about["figures"].items()}
    return from_text(json.dumps(about), "scaled")


def test_noise_of_a_few_percent_changes_nothing_that_rules_see() -> None:
    for factor in (0.97, 1.0, 1.03):
        assert rounded(scaled(AVX2, factor)) == AVX2
    assert rounded(scaled(AVX2, 1.3)) != AVX2


def test_what_is_measured_again_stays_unless_it_differs_by_a_step_of_the_rounding() -> None:
    assert steadied(scaled(AVX2, 1.15), AVX2).figures == AVX2.figures, "no border between two steps is crossed"
    slower = scaled(AVX2, 0.7)
    assert steadied(slower, AVX2) == slower


def test_more_cores_compute_more_and_share_memory() -> None:
    assert with_cores(AVX512, AVX512.cores) is AVX512
    many = with_cores(AVX512, 8 * AVX512.cores)
    assert many.cores == 8 * AVX512.cores
    assert many.flops.f32.all == 8 * AVX512.flops.f32.all and many.own_level.read.all == 8 * AVX512.own_level.read.all
    assert many.memory == AVX512.memory and many.flops.f32.one == AVX512.flops.f32.one
    alone = with_cores(AVX512, 1)
    assert all(alone.figures[f"{name}.all"] == alone.figures[f"{name}.one"] for name in ("memory.read", "flops.f32"))


def test_a_machine_survives_its_file() -> None:
    machine = replace(AVX512, name="a CPU", cores=7, spread={"barrier": 0.125})
    again = from_text(to_text(machine), "file")
    assert again == machine and again.spread == machine.spread
    assert len(again.figures) == len(AVX2.figures) == 47


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"isa": "SSE"},
        {"caches": {}},
        {"caches": {"l9": 5}},
        {"caches": {"l1": -5}},
        {"cores": 0},
        {"cores": "many"},
        {"figures": {}},
        {"figures": None},
        {"figures": {**AVX2.figures, "barrier": 0}},
        {"figures": {**AVX2.figures, "barrier": float("nan")}},
        {"figures": {**AVX2.figures, "barrier": "fast"}},
    ],
)
def test_what_describes_no_machine_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"machine\.json describes no machine"):
        from_text(json.dumps(json.loads(to_text(AVX2)) | change), "machine.json")


def test_text_that_is_no_json_is_refused() -> None:
    for text in ("", "[]", "null", "{", "3"):
        with pytest.raises(UserError, match="describes no machine"):
            from_text(text, "machine.json")


def test_threads_add_up_until_all_cores_are_reached() -> None:
    rate = Rate(10.0, 25.0)
    assert [rate.of(threads) for threads in (0, 1, 2, 3, 64)] == [10, 10, 20, 25, 25]
    assert Rate(10.0, 8.0).of(2) == 10, "threads in each other's way are not slower than one alone"


def test_what_is_worked_on_lies_in_the_nearest_cache_that_holds_it() -> None:
    sizes = {level.name: level.size for level in AVX2.levels}
    assert AVX2.level(sizes["l1"]).name == "l1"
    assert AVX2.level(sizes["l1"] + 1).name == "l2"
    assert AVX2.level(2 * sizes["l2"], threads=2).name == "l2", "each thread has one of its own"
    assert AVX2.level(sizes["l3"], threads=2).name == "l3"
    assert AVX2.level(sizes["l3"] + 1, threads=2).name == "memory", "that one they share"


def test_ways_are_kept_and_a_file_without_them_has_the_usual_ones() -> None:
    levels = tuple(replace(level, ways=12) for level in AVX2.levels[:-1])
    machine = replace(AVX2, levels=(*levels, AVX2.memory))
    assert from_text(to_text(machine), "file") == machine
    about = json.loads(to_text(machine))
    del about["ways"]
    assert {level.ways for level in from_text(json.dumps(about), "file").levels} == {WAYS}
    with pytest.raises(UserError, match="a cache has no ways"):
        from_text(json.dumps(json.loads(to_text(machine)) | {"ways": {"l1": 0}}), "file")
