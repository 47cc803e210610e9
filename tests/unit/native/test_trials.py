"""What came out of trials, in the store and in decisions; and trials in the runtime."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time

import pytest
import torch

from pellucid.native.build import build, default_store
from pellucid.native.instance import InputSlot, KernelCall, OutputSlot, Trial, Variant
from pellucid.native.runtime import Instance
from pellucid.native.trials import Choices, Outcome, keep, parse, recall, trial_key, variants
from tests.unit.native.support import kernel_text, view

SLOW = """
  float* y = (float*)p[0];
  for (int64_t k = 0; k < 400; k++) for (int64_t i = begin; i < end; i++) ((volatile float*)y)[i] = 1;
  return 0;
"""
QUICK = """
  float* y = (float*)p[0];
  for (int64_t i = begin; i < end; i++) y[i] = 1;
  return 0;
"""
SOURCES = {"slow": "text of slow", "quick": "text of quick"}
SAID = {"kernels": ["slow", "quick"], "fastest": "quick", "ns": [20, 10], "pairs": 3}


@pytest.fixture
def one_thread():
    """So that calls count also while others want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE_DIR", str(tmp_path))
    return default_store()


# ------------------------------------------------------------------------------------------------ the store


def test_what_is_kept_is_found_again(store):
    outcome = Outcome(("slow", "quick"), "quick", (20, 10), 3)
    keep("a" * 40, outcome)
    found = recall("a" * 40, ("slow", "quick"))
    assert found is not None and not found.here
    assert (found.kernels, found.fastest, found.ns, found.pairs) == (("slow", "quick"), "quick", (20, 10), 3)
    assert recall("b" * 40, ("slow", "quick")) is None


def test_an_entry_about_other_kernels_is_none(store):
    keep("a" * 40, Outcome(("slow", "quick"), "quick", (20, 10), 3))
    assert recall("a" * 40, ("slow", "other")) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\x00",
        b"[1, 2]",
        json.dumps(SAID)[:40].encode(),
        *(json.dumps({**SAID, **wrong}).encode() for wrong in (
            {"kernels": "slow"},
            {"kernels": [1, 2]},
            {"fastest": "other"},
            {"fastest": None},
            {"ns": [20]},
            {"ns": ["20", "10"]},
            {"ns": 3},
            {"pairs": "3"},
        )),
    ],
)  # fmt: skip
def test_a_damaged_entry_is_none(store, data):
    assert parse(json.dumps(SAID).encode()) is not None
    store.add_trial("a" * 40, data)
    assert recall("a" * 40, ("slow", "quick")) is None


@pytest.mark.parametrize("change", ["file", "folder", "link"])
def test_an_entry_that_others_could_have_written_is_none(store, tmp_path, change):
    keep("a" * 40, Outcome(("slow", "quick"), "quick", (20, 10), 3))
    path = store.directory / "trials" / ("a" * 40)
    if change == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        (path if change == "file" else path.parent).chmod(0o777)
    assert recall("a" * 40, ("slow", "quick")) is None


def test_where_nothing_can_be_written_nothing_is_kept(store):
    (store.directory / "trials").write_text("no directory")
    keep("a" * 40, Outcome(("slow", "quick"), "quick", (20, 10), 3))
    assert recall("a" * 40, ("slow", "quick")) is None


def test_the_key_has_texts_order_threads_and_machine(monkeypatch, tmp_path, one_thread):
    key = trial_key(SOURCES)
    assert trial_key(dict(SOURCES)) == key
    others = [trial_key({**SOURCES, "quick": "another text"}), trial_key(dict(reversed(SOURCES.items())))]
    torch.set_num_threads(2)
    others.append(trial_key(SOURCES))
    torch.set_num_threads(1)
    monkeypatch.setattr("pellucid.native.trials.machine_file", lambda: tmp_path / "machine-other.json")
    others.append(trial_key(SOURCES))
    assert len({key, *others}) == 5


# ------------------------------------------------------------------------------------------------ choices


def test_a_choice_is_pending_until_it_is_made_and_then_found_by_others(store):
    candidates, decisions = (Variant(1, 4, 1), Variant(2, 8, 1)), []
    choices = Choices()
    choices.report = decisions.append
    variant, trial = choices.of("add_0", SOURCES, candidates)
    again = choices.of("add_1", SOURCES, candidates)
    assert variant == candidates[0] and trial is not None and again == (variant, trial)
    (pending,) = choices.decisions
    assert not pending.ok and pending.subject == ("add_0", "add_1") and decisions == []
    assert pending in variants()
    trial.settled([1, 7, 20_000, 10_000])
    assert choices.decisions == tuple(decisions) and decisions[0].ok
    assert decisions[0].why == "quick is the fastest of 2: slow 20 us, quick 10 us"
    assert dict(decisions[0].facts) == {"kernels": "slow quick", "fastest": "quick", "pairs": 7}
    assert choices.of("add_2", SOURCES, candidates) == (candidates[1], None)
    later = Choices()
    assert later.of("add_0", SOURCES, candidates) == (candidates[1], None)
    assert "as an earlier process found out" in later.decisions[0].why


# ------------------------------------------------------------------------------------------------ the runtime


@pytest.fixture(scope="module")
def addresses():
    return build({"test_slow": kernel_text("test_slow", SLOW), "test_quick": kernel_text("test_quick", QUICK)})[0]


def instance_of(addresses, settled, names=("test_slow", "test_quick"), sites=1, threads=1):
    n = 4096
    candidates = tuple(Variant(addresses[name], n, 1 << 40) for name in names)
    trial = Trial(candidates, threads, settled)
    calls = [KernelCall(candidates[0].address, (k,), (), n, 1 << 40, f"k{k}", trial=trial) for k in range(sites)]
    return Instance([OutputSlot(4 * n)] * sites, calls, [view(k, n) for k in range(sites)], inputs=0, arena=0)


def run_until(instance, done, seconds=60.0):
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        assert all((out == 1).all() for out in instance.run([]))


@pytest.mark.parametrize("sites", [1, 3])
def test_calls_find_the_faster_way_and_tell_it_once(addresses, one_thread, sites):
    told = []
    instance = instance_of(addresses, told.append, sites=sites)
    run_until(instance, lambda: told)
    for _ in range(10):
        instance.run([])
    ((fastest, pairs, slow, quick),) = told
    assert fastest == 1 and pairs >= 3 and slow > quick > 0


def test_the_cheapest_stays_where_it_is_the_fastest(addresses, one_thread):
    told = []
    run_until(instance := instance_of(addresses, told.append, ("test_quick", "test_slow")), lambda: told)
    instance.run([])
    assert told[0][0] == 0


def test_calls_with_another_number_of_threads_do_not_count(addresses, one_thread):
    told = []
    instance = instance_of(addresses, told.append, threads=2)
    for _ in range(100):
        instance.run([])
    assert told == []


def test_many_threads_may_run_an_instance_that_tries(addresses, one_thread):
    told, wrong = [], []
    instance = instance_of(addresses, told.append, ("test_slow", "test_quick", "test_slow"), sites=2)

    def run() -> None:
        torch.set_num_threads(1)
        end = time.monotonic() + 60
        while not told and time.monotonic() < end:
            wrong.extend(out for out in instance.run([]) if not (out == 1).all())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 1 and told[0][0] == 1 and not wrong


def test_what_fails_while_it_is_told_fails_no_run(addresses, one_thread, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: seen.append(str(found.exc_value)))

    def settled(_: list[int]) -> None:
        raise OSError("the disk is full")

    run_until(instance_of(addresses, settled), lambda: seen)
    assert seen == ["the disk is full"]


def test_an_instance_lets_go_of_what_it_tells(addresses, one_thread):
    class Told:
        def __call__(self, _: list[int]) -> None: ...

    gc.collect()
    settled = Told()
    before = sys.getrefcount(settled)
    instance = instance_of(addresses, settled)
    assert sys.getrefcount(settled) > before
    del instance
    gc.collect()
    assert sys.getrefcount(settled) == before


def test_a_forked_child_goes_on(addresses, one_thread):
    told = []
    instance = instance_of(addresses, told.append)
    instance.run([])
    child = os.fork()
    if child == 0:
        os._exit(0 if all((out == 1).all() for out in instance.run([])) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_index_check_that_fails_in_a_trial_raises(kernels, one_thread):
    told = []
    candidates = (Variant(kernels["test_check"], 3, 1 << 40),) * 2
    trial = Trial(candidates, 1, told.append)
    call = KernelCall(candidates[0].address, (0,), (10,), 3, 1 << 40, "k", ("", "{index} of {size}"), trial=trial)
    instance = Instance([InputSlot(0)], [call], [None], inputs=1, arena=0)
    for _ in range(3):
        with pytest.raises(IndexError, match="12 of 10"):
            instance.run([torch.tensor([1, 12, 0])])
    assert instance.run([torch.tensor([1, 2, 3])]) == [None]
