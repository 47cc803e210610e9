from __future__ import annotations

import errno
import threading
import time
from array import array
from statistics import median

import pytest
import torch

from pellucid.native import timeline
from pellucid.native.counters import Counter, _why, refused
from pellucid.native.instance import InputSlot, KernelCall, OutputSlot
from pellucid.native.runtime import Instance
from pellucid.native.timeline import Timeline
from tests.unit.native.support import view


def test_a_timeline_has_each_call_of_each_run_and_each_threads_share(add):
    x, before = torch.ones(1000), torch.get_num_threads()
    shared, alone = add(1000, grain=1), add(1000)
    alone.run([x, x])
    torch.set_num_threads(2)
    try:
        timeline.start()
        since = time.perf_counter_ns()
        for instance in (shared, alone, shared):
            instance.run([x, x])
        until = time.perf_counter_ns()
        taken = timeline.stop()
    finally:
        torch.set_num_threads(before)
    alone.run([x, x])
    runs = list(taken)
    assert [run.plan for run in runs] == [shared.number, alone.number, shared.number] and taken.lost == 0
    for run in runs:
        (call,) = run.calls
        assert since <= run.span.begin <= call.begin <= call.end <= run.span.end <= until
        assert run.span.thread == threading.get_native_id()
        assert len(call.shares) == (0 if run.plan == alone.number else 2)
        assert all(call.begin <= share.begin <= share.end <= call.end for share in call.shares)
    assert len({share.thread for share in runs[0].calls[0].shares}) == 2


def test_a_run_that_fails_has_the_times_of_the_calls_before(kernels):
    calls = [
        KernelCall(kernels["test_check"], (0,), (limit,), 1, 1 << 40, f"check_{limit}", ("{index} {size}",) * 2)
        for limit in (10, 5, 10)
    ]
    instance = Instance([InputSlot(0)], calls, [None], inputs=1, arena=0)
    timeline.start()
    with pytest.raises(IndexError):
        instance.run([torch.tensor([7])])
    (run,) = timeline.stop()
    assert len(run.calls) == 1


def test_a_timeline_starts_empty(add):
    timeline.start()
    add(4).run([torch.ones(4), torch.ones(4)])
    timeline.start()
    assert list(timeline.stop()) == []


@pytest.mark.alone
def test_brief_calls_in_a_row_are_timed_together_and_each_alone_in_some_runs(kernels):
    """40 calls on 4 elements, one on a million, and 40 more."""
    n = 1 << 20
    extents = [4] * 40 + [n] + [4] * 40
    calls = [KernelCall(kernels["test_add"], (0, 1, 2), (), extent, 1 << 40, "add") for extent in extents]
    instance = Instance([InputSlot(0), InputSlot(1), OutputSlot(4 * n)], calls, [view(2, n)], inputs=2, arena=0)
    x = torch.ones(n)
    instance.run([x, x])
    for _ in range(5):  # while other processes disturb the first run, brief calls are not known as such
        timeline.start()
        for _ in range(17):
            instance.run([x, x])
        taken = timeline.stop()
        read = [[bool(end) for end in run.ends] for run in taken._runs()]
        if all(sum(ends) < 0.7 * len(ends) for ends in read[1:]):
            break
    assert all(read[0]) and all(sum(ends) < 0.7 * len(ends) for ends in read[1:])
    alone = [sum(ends[i - 1] and ends[i] for ends in read[1:]) for i in range(1, len(extents))]
    assert min(alone) >= 2
    assert all(ends[39] and ends[40] for ends in read)  # the long call is always timed by itself
    shares = []
    for run in taken:
        assert len(run.calls) == len(extents)
        assert all(one.end == other.begin for one, other in zip(run.calls, run.calls[1:], strict=False))
        spans = [call.end - call.begin for call in run.calls]
        assert min(spans) >= 0
        shares.append(spans[40] / sum(spans))
    assert median(shares) > 0.7  # other processes may disturb a run


def test_what_was_timed_together_is_divided_as_it_takes_alone():
    def words(first, *ends):
        return [7, 1, first, first, max(ends), len(ends), 0, 0, *ends]

    # calls of 10, 30 and 20 in the first run; twice as slow in the second, which read the last end only; the third
    # failed in its third call
    taken = Timeline(array("q", words(0, 10, 40, 60) + words(100, 0, 0, 220) + words(300, 310, 0)), 0, 0, 0, 1.0)
    times = [[call.end - call.begin for call in run.calls] for run in taken]
    assert times == [[10, 30, 20], [20, 60, 40], [10]]


def test_counters_count_each_call_in_the_thread_that_calls(kernels):
    """A counter of the system's own, which machines without hardware counters have too: nanoseconds of the thread."""
    clock = Counter("task-clock", 1, 1)
    if refused([clock]):
        pytest.skip("this sandbox lets no process count")
    n = 1 << 20
    calls = [KernelCall(kernels["test_add"], (0, 1, 2), (), extent, 1 << 40, "add") for extent in (4, n, 4)]
    instance = Instance([InputSlot(0), InputSlot(1), OutputSlot(4 * n)], calls, [view(2, n)], inputs=2, arena=0)
    x = torch.ones(n)
    instance.run([x, x])
    timeline.start([clock, clock])
    instance.run([x, x])
    instance.run([x, x])
    for run in timeline.stop():
        counts = [call.counts for call in run.calls]
        assert all(len(each) == 2 and min(each) > 0 for each in counts)
        assert counts[1][0] > 2 * counts[0][0]
    timeline.start()
    instance.run([x, x])
    (run,) = timeline.stop()
    assert all(call.counts == () for call in run.calls)


@pytest.mark.parametrize(
    ("number", "paranoid", "why", "remedy"),
    [
        (errno.ENOENT, 2, "virtual machines", "pmu=on"),
        (errno.EACCES, 3, "perf_event_paranoid is 3", "sysctl"),
        (errno.EPERM, 1, "sandbox", "PERFMON"),
        (errno.ENOSYS, 0, "no perf events", ""),
        (errno.EMFILE, 0, "Too many open files", ""),
    ],
)
def test_why_there_are_no_counters(number, paranoid, why, remedy):
    found = _why(number, paranoid)
    assert why in found.why and remedy in found.remedy and why in str(found)


def test_a_counter_that_no_machine_has_is_refused():
    found = refused([Counter("nothing", 1, 10_000)])
    assert found is not None and str(found)
