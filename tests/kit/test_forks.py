"""Forks of a process for what may die: their answers, and their ends."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

import pytest
import torch

from pellucid.kit.process.apart import Apart
from pellucid.kit.process.child import Failure, Worker
from pellucid.kit.process.forks import Forks


def multiply(size, how=""):
    if how == "raise":
        raise KeyError(size)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        time.sleep(60)
    if how == "eat":
        torch.ones(1 << 28)
        time.sleep(60)
    return float((torch.ones(size, size) @ torch.ones(size, size)).sum())


def forked():
    """In a process that has no threads: answers of forks, in the order of the calls."""
    torch.set_num_threads(1)
    before = multiply(300)
    with Forks(2, threads=2, memory=800 << 20) as forks:
        answers = forks.map(
            multiply, [(300,), (3, "raise"), (300,), (3, "crash"), (3, "hang"), (3, "eat"), (300,)], 5.0
        )
        again = forks.call(multiply, 300, seconds=30.0)
    return before, answers, again


@pytest.mark.sampled
def test_forks_answer_fail_and_die_each_for_itself():
    before, answers, again = Apart("tests.kit.test_forks:forked").result(print, 100.0)
    assert before == again == answers[0] == answers[2] == answers[6] == 300.0**3
    failures = [answers[number] for number in (1, 3, 4, 5)]
    assert all(isinstance(failure, Failure) for failure in failures)
    assert [failure.kind for failure in failures] == ["error", "crash", "hang", "crash"]
    assert [failure.what for failure in failures[:2]] == ["KeyError", "SIGSEGV"] and "memory" in failures[3].what


def end_after_a_warning(how):
    warnings.warn("something else", stacklevel=1)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    sys.exit(3 if how == "status" else "the disk is full")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("status", "it ended itself with exit status 3"),
        ("text", "it ended itself with exit status 1: the disk is full"),
        ("signal", "SIGSEGV"),
    ],
)
def test_a_warning_is_no_cause_of_an_end(how, said):
    with Worker() as worker:
        assert str(worker.call(end_after_a_warning, how, seconds=60.0)) == said
