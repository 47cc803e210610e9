"""Profiles: bytes and FLOPs beside hand counts, rows that add up, and what is said of programs that do not fit."""

from __future__ import annotations

import functools
import json
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import pellucid
from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug.check import Request
from pellucid.kit.profile import measure
from pellucid.kit.profile.compare import compare
from pellucid.kit.profile.measure import Program, program_of, take
from pellucid.kit.profile.request import profile_target
from pellucid.kit.profile.result import KernelTime, Overhead, Profile
from pellucid.kit.profile.rows import Call, profile_of
from pellucid.kit.profile.saved import saved
from pellucid.kit.programs.case import Case
from pellucid.kit.shown import plain
from pellucid.kit.stats import geometric_mean
from pellucid.kit.subjects.clock import Clock, Timed, TimedRun
from pellucid.kit.subjects.facts import StepFacts, library_flops
from pellucid.kit.subjects.registry import subject_of
from pellucid.native.counters import Refused
from pellucid.native.timeline import CallTime, Span
from tests.kit.facts import facts_of

N, M = 48, 80


def f32(*shape):
    return torch.randn(*shape)


# By hand: (loaded bytes, stored bytes, FLOPs). An element of f32 has 4 bytes, of i64 8.
COUNTS = {
    "pointwise": (lambda x: (x * 2 + 1).relu(), lambda: (f32(N, M),), (4 * N * M, 4 * N * M, 3 * N * M)),
    "broadcast": (lambda x, y: x + y, lambda: (f32(N, M), f32(M)), (4 * (N * M + M), 4 * N * M, N * M)),
    "reduction": (lambda x: x.sum(1), lambda: (f32(N, M),), (4 * N * M, 4 * N, N * M)),
    # the maximum, x - it, exp, the sum, the quotient
    "softmax": (lambda x: x.softmax(1), lambda: (f32(N, M),), (4 * N * M, 4 * N * M, 5 * N * M)),
    "transpose": (lambda x: x.t().contiguous() * 2, lambda: (f32(N, M),), (4 * N * M, 4 * N * M, N * M)),
    # three rows of x, each of its own number
    "gather": (
        lambda x, i: x[i] * 2,
        lambda: (f32(N, M), torch.tensor([5, 0, 7])),
        (3 * 8 + 3 * M * 4, 3 * M * 4, 3 * M),
    ),
    # windows of 3 that overlap reach the first 2*22+3 of 48 rows and 2*38+3 of 80 columns: each element counts once
    "pooling": (
        lambda x: F.max_pool2d(x[None, None], 3, 2, return_indices=False),
        lambda: (f32(N, M),),
        (4 * 47 * 79, 4 * 23 * 39, None),
    ),
    # what is added is read, and what it is added to read and written, an element for each point
    "scatter": (
        lambda x, i, y: x.index_add(0, i, y),
        lambda: (f32(N, M), torch.tensor([1, 2, 1]), f32(3, M)),
        (8 * 3 + 2 * 4 * 3 * M, 4 * 3 * M, 3 * M),
    ),
    "gemm": (lambda x, y: x @ y, lambda: (f32(N, M), f32(M, 32)), (4 * (N * M + M * 32), 4 * N * 32, 2 * N * M * 32)),
    # 3 x 3 over 8 channels, 16 of them out, no padding: 14 x 14 places
    "convolution": (
        lambda x, w: F.conv2d(x, w),
        lambda: (f32(1, 8, 16, 16).to(memory_format=torch.channels_last), f32(16, 8, 3, 3)),
        (4 * (8 * 16 * 16 + 16 * 8 * 9), 4 * 16 * 14 * 14, 2 * 16 * 14 * 14 * 8 * 9),
    ),
    # two products; scale, maximum, difference, exponential and sum of each score; a quotient of each result
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda: (f32(2, 4, 32, 16), f32(2, 4, 64, 16), f32(2, 4, 64, 16)),
        (4 * 2 * 4 * 16 * (32 + 64 + 64), 4 * 2 * 4 * 32 * 16, 2 * 4 * 32 * (64 * (2 * (16 + 16) + 5) + 16)),
    ),
}


@pytest.mark.parametrize("what", COUNTS)
def test_bytes_and_flops_are_those_counted_by_hand(what):
    """As the rows of a profile show them."""
    fn, make, (loaded, stored, flops) = COUNTS[what]
    steps = facts_of(fn, *make())
    found = profile_of_runs(TimedRun("g", Span(1, 0, 1000), tuple(Timed(step, CallTime(0, 9, ())) for step in steps)))
    (step,) = (each for each in steps if what != "scatter" or "i64[3]" in each.reads)  # which copies x first
    assert (step.loaded, step.stored) == (loaded, stored)
    row = next(row for row in found.kernels if row.symbol == step.symbol)
    assert row.bytes == loaded + stored
    assert flops is None or row.flops == flops


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_count_as_pytorchs_own_counter_counts_them(transposed, groups):
    aten = torch.ops.aten
    x, *rest = torch.empty(2, 4, 11, 13, device="meta"), [2, 1], [1, 0], [1, 1], transposed, [0, 0], groups
    weight = torch.empty(*((4, 6 // groups) if transposed else (6, 4 // groups)), 3, 5, device="meta")
    y = aten.convolution(x, weight, None, *rest)
    forward = counted(lambda: aten.convolution(x, weight, None, *rest))
    assert library_flops(aten.convolution.default, (x, weight, None, *rest), {}, [y]) == ("convolution", forward)
    args = (y, x, weight, None, *rest, [True, True, False])
    assert library_flops(aten.convolution_backward.default, args, {}, []) == ("convolution", 2 * forward)
    if groups == 1:  # the counter takes the groups of one gradient twice
        assert counted(lambda: aten.convolution_backward(*args)) == 2 * forward


def test_inductors_kernels_count_the_same():
    def fn(x, y, w):
        return (x + y).softmax(1), x @ w

    steps = facts_of(fn, f32(N, M), f32(M), f32(M, 32), backend="inductor")
    kernel, product = sorted(steps, key=lambda step: step.kind != "kernel")
    assert product.kind == "product" and product.flops == 2 * N * M * 32
    assert product.nbytes == 4 * (N * M + M * 32 + N * 32)
    assert "f32[48, 80]" in kernel.reads and "test_profile.py" in str(kernel.origin.users)
    # what it keeps of each row, the maximum and the sum, goes through memory, and x and y are read again or kept
    assert 4 * (N * M + M) <= kernel.loaded <= 4 * (2 * N * M + M + 2 * N)
    assert 4 * N * M <= kernel.stored <= 4 * (N * M + 2 * N)
    # six operations at each point if nothing were computed again; it computes the sum and exp once more for each pass
    assert 6 * N * M <= kernel.flops <= 12 * N * M


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fn", "each"),
    [(torch.sin, 1), (lambda x: x.t().contiguous(), 0), (lambda x: x.sum(-1), 1), (lambda x: x * 2 + 1, 2)],
)
def test_inductors_operations_are_those_counted_by_hand(fn, each):
    (step,) = facts_of(fn, f32(N, M), backend="inductor")
    assert step.flops == each * N * M


# ------------------------------------------------------------------------------------------------ whole programs


def small(x, w):
    return (x @ w).softmax(1), x.exp().sum(0)


@pytest.fixture(scope="module")
def taken():
    case = Case("small", small, (f32(N, N), f32(N, N)))
    (found,) = take([program_of(case, subject_of("pellucid"))], "small", budget=0.1)
    return found


def test_rows_and_what_is_left_add_up_to_the_whole(taken):
    total = sum(row.total_microseconds for row in taken.kernels) + taken.overhead.microseconds
    assert total == pytest.approx(taken.microseconds, rel=1e-6)
    assert taken.overhead.python_microseconds > 0 and taken.overhead.launch_microseconds > 0
    assert sum(row.share for row in taken.kernels) < 1
    assert taken.graph_runs == 1 and taken.plain_microseconds and taken.good
    assert all("other processes took the cores" in note for note in taken.notes), "which a test can't prevent"


def test_rows_say_what_they_are(taken):
    (product,) = (row for row in taken.kernels if row.group == "matrix products")
    assert "mm" in product.fx_nodes and product.kind == "kernel" and product.calls == 1
    assert product.gigaflops_per_second == pytest.approx(2e-3 * N**3 / product.microseconds, rel=0.1)
    kernels = [row for row in taken.kernels if row.kind == "kernel"]
    assert {"sum_1", "_softmax"} <= {node for row in kernels for node in row.fx_nodes}
    assert all("test_profile.py:" in line for row in kernels for line in row.user_lines)


def test_the_text_fits_a_pipe_and_names_all_rows(taken):
    text = str(taken)
    assert "a call of the program" in text and all(row.name in text for row in taken.kernels)


def test_eager_is_explained_group_by_group(taken):
    case = Case("small", small, (f32(N, N), f32(N, N)))
    (eager,) = take([program_of(case, None)], "small", budget=0.05)
    found = compare(taken, eager)
    assert {row.group for row in found.explained} >= {"matrix products", "element-wise and reductions"}
    assert found.difference_microseconds == eager.microseconds - taken.plain_microseconds
    explained = sum(row.difference_microseconds for row in found.explained)
    steps = sum(row.total_microseconds for row in taken.kernels)
    assert taken.plain_microseconds is not None
    left = max(0.0, taken.plain_microseconds - steps)
    assert explained == pytest.approx(eager.microseconds - steps - left), "every row is in a group, and what is left"
    assert found.unexplained_microseconds == pytest.approx(steps + left - taken.plain_microseconds, abs=1e-6)
    assert "times as long" in str(found) and "not explained" in str(found)


def test_a_profile_that_was_read_from_a_run_is_called_by_its_name(taken, tmp_path):
    found = compare(taken, replace(taken, plain_microseconds=1e5), "before")
    (tmp_path / "profile.json").write_text(json.dumps(plain(found)))
    for each in (found, saved(tmp_path / "profile.json")):
        text = str(each)
        assert f"; before: 100 ms, {1e5 / taken.plain_microseconds:.2f} times as long" in text
        assert (
            "before µs  pellucid µs" in text
            and "before (pellucid): " in text
            and "pellucid µs  pellucid µs" not in text
        )
        assert "before takes " in each._repr_html_()


def test_training_counts_forward_and_backward():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    program = program_of(Case("net", module, (f32(4, 8),)), subject_of("pellucid"), backward=True)
    (found,) = take([program], "net", budget=0.05)
    assert found.graph_runs == 2
    assert {step.partition("_")[0] for row in found.kernels for step in row.steps} == {"forward", "backward"}


def test_a_program_that_fails_later_has_a_profile_of_what_ran():
    left = [20]

    def fn(x):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("out of luck")
        return run(x)

    run = torch.compile(lambda x: x.exp().sum(), backend="pellucid")
    case = Case("fails", fn, (f32(8),))
    subject = subject_of("pellucid")
    program = program_of(case, subject)
    program.call = lambda: fn(*case.args)
    (found,) = take([program], "fails", budget=5)
    assert found.failure == "RuntimeError: out of luck" and not found.good
    assert "the program failed" in str(found)


def test_a_program_that_fails_at_once_is_refused():
    def fn(x):
        if torch.compiler.is_compiling():
            return x.view(3)
        return x

    with pytest.raises(UserError, match="fails under pellucid: RuntimeError: shape '\\[3\\]' is invalid") as failed:
        take([program_of(Case("fails", fn, (f32(2),)), subject_of("pellucid"))], "fails", budget=0.1)
    assert not isinstance(failed.value, NotJudged)


@pytest.mark.parametrize("backend", ["pellucid", "eager"])
def test_a_program_that_fails_in_eager_mode_too_is_not_judged(backend):
    program = program_of(
        Case("fails", lambda x: x @ x, (f32(3, 4),)), subject_of(backend) if backend != "eager" else None
    )
    with pytest.raises(NotJudged, match="fails in eager mode: RuntimeError: mat1 and mat2 shapes") as failed:
        take([program], "fails", budget=0.1)
    assert "test_profile.py" in str(failed.value.context)


def test_what_a_backend_raises_is_told_with_its_cause():
    """Dynamo's own message tells which function the backend is, on a line of its own."""

    def refuse(*_):
        raise ArithmeticError("what is wrong:\n\n  this\nand more")

    compiled = torch.compile(lambda x: x + 1, backend=functools.partial(refuse))
    program = Program("other", lambda: compiled(f32(2)), lambda: None)
    with pytest.raises(UserError, match=r"fails under other: ArithmeticError: what is wrong: this\n"):
        take([program], "fails", budget=0.1)


def test_a_program_without_graphs_says_so():
    def fn(x):
        torch._dynamo.graph_break()
        return None

    (found,) = take([program_of(Case("empty", fn, (f32(2),)), subject_of("pellucid"))], "empty", budget=0.05)
    assert "no graph compiled by pellucid ran" in found.notes and not found.kernels
    assert found.overhead.python_microseconds == pytest.approx(found.microseconds)


def test_rows_are_held_against_the_machine(taken):
    for row in taken.kernels:
        assert row.limit and row.percent_of_limit > 0 and row.estimate_factor >= 1
        assert bool(row.why_below) == (round(row.percent_of_limit) < 70), row
        assert row.because in " ".join(str(taken).split())
    assert taken.estimate_factor == pytest.approx(geometric_mean([row.estimate_factor for row in taken.kernels]))
    assert "geometric mean of" in str(taken) and "`pellucid doctor`" in str(taken)


# ------------------------------------------------------------------------------------------------ around any code


def test_what_is_beyond_its_limit_says_why():
    """Only attention leaves out what counts as work."""
    row = KernelTime("a", "kernel", "attention", "a", 1, 5.0, 0.0, 5.0, 0.1, limit="compute", percent_of_limit=170.0)
    assert "masked-out scores" in row.because
    assert not replace(row, percent_of_limit=80.0).because and not replace(row, group="products").because


def test_a_block_is_profiled_in_all_threads():
    run = torch.compile(lambda x: x.exp().sum(0), backend="pellucid")
    x = f32(64, 64)
    run(x)
    with pellucid.profile() as p:
        run(x)
        thread = threading.Thread(target=run, args=(x,))
        thread.start()
        thread.join()
    assert p.result.graph_runs == 2 and p.result.kernels[0].calls == 2
    text, page = str(p), p._repr_html_()
    assert "exp" in text and "call of the program" not in text and "±" not in text
    assert " ms for the block (" in text and " the block\n" in text and "in the block; rates" in text
    assert "for the block under pellucid (" in page and "of 1 calls" not in page


def test_an_exception_passes_through_and_leaves_what_ran():
    run = torch.compile(lambda x: x.exp().sum(0), backend="pellucid")
    run(f32(8, 8))
    with pytest.raises(KeyError), pellucid.profile() as p:
        run(f32(8, 8))
        raise KeyError("k")
    assert p.result.failure == "KeyError: 'k'" and len(p.result.kernels) == 1


def test_a_block_says_that_graphs_were_compiled_in_it():
    """The pages that this takes are not the allocator's."""
    torch._dynamo.reset()
    compiled = torch.compile(small, backend="pellucid")
    with pellucid.profile() as first:
        compiled(f32(N, N), f32(N, N))
    with pellucid.profile() as second:
        compiled(f32(N, N), f32(N, N))
    assert "graphs were compiled in the block: 1" in " ".join(first.result.notes)
    assert not [each for each in first.result.advice if each.category in ("allocator", "page-faults")]
    assert not [note for note in second.result.notes if "compiled in the block" in note]


def test_one_profile_at_a_time():
    with pellucid.profile() as p:
        with pytest.raises(UserError, match="already"), pellucid.profile():
            pass
        for look in (str, type(p)._repr_html_, lambda p: p.result, lambda p: p.trace("trace.json")):
            with pytest.raises(UserError, match="not finished"):
                look(p)
    assert "no graph compiled by pellucid ran" in p.result.notes


def test_a_trace_has_a_track_for_each_thread(tmp_path):
    run = torch.compile(lambda x: x.exp().sum(1), backend="pellucid")
    x = f32(512, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(x)
        with pellucid.profile() as p:
            run(x)
    finally:
        torch.set_num_threads(before)
    p.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in slices} == {"program", "graph", "kernel", "share"}
    assert len({event["tid"] for event in slices}) == 2
    (kernel,) = [event for event in slices if event["cat"] == "kernel"]
    assert kernel["args"]["bytes"] == 4 * (512 * 512 + 512) and "test_profile.py" in kernel["args"]["user_lines"]
    (graph,) = [event for event in slices if event["cat"] == "graph"]
    assert graph["ts"] <= kernel["ts"] and kernel["ts"] + kernel["dur"] <= graph["ts"] + graph["dur"]


# ------------------------------------------------------------------------------------------------ rows, made by hand


def run_of(*steps, thread=1, begin=0, end=1000):
    timed = tuple(
        Timed(StepFacts("graph", name, f"k_{name}", "kernel", threads=2), CallTime(a, b, tuple(shares)))
        for name, a, b, *shares in steps
    )
    return TimedRun("graph", Span(thread, begin, end), timed)


def profile_of_runs(*runs, calls=None) -> Profile:
    return profile_of(Clock(list(runs)), calls or [Call(0, 1000)], backend="b", target="t")


def test_a_graph_that_a_step_of_another_runs_counts_once():
    outer = run_of(("outer", 100, 900), begin=50, end=950)
    inner = run_of(("inner", 300, 600), begin=200, end=700)
    found = profile_of_runs(outer, inner)
    assert {row.name: row.total_microseconds for row in found.kernels} == {"outer": 0.3, "inner": 0.3}
    assert found.overhead == Overhead(pytest.approx(0.1), pytest.approx(0.3))


def test_imbalance_is_the_share_of_time_that_threads_wait():
    found = profile_of_runs(run_of(("k", 0, 1000, Span(1, 0, 900), Span(2, 0, 300))))
    assert found.kernels[0].threads == 2
    assert found.kernels[0].imbalance == pytest.approx(600 / 1800)
    assert "wait 33%" in str(found)


def test_graphs_in_several_threads_at_once_are_said():
    found = profile_of_runs(run_of(("k", 0, 800), thread=1), run_of(("k", 100, 900), thread=2))
    assert any("several threads" in note for note in found.notes)


def test_counters_stand_in_the_row_of_their_step():
    counted = Clock()
    for counts in ((900, 300, 7), (1000, 400, 9), (5000, 410, 8)):
        run = run_of(("k", 0, 100))
        (step,) = run.steps
        counted.add(replace(run, steps=(Timed(step.facts, step.time._replace(counts=counts)),)))
    clock_of_times = Clock([run_of(("k", 0, 100))])
    found = profile_of(clock_of_times, [Call(0, 1000)], backend="pellucid", target="", counted=counted)
    (row,) = found.kernels
    assert (row.cycles, row.instructions, row.cache_misses) == (1000, 400, 8) and row.cycles_per_instruction == 2.5
    assert "2.50 cycles per instruction, 8 last-level cache misses" in str(found)


def test_without_counters_a_profile_says_why(monkeypatch):
    monkeypatch.setattr(measure, "refused", lambda counters: Refused("the sandbox refuses", "ask for them"))
    torch._dynamo.reset()
    (found,) = take([program_of(Case("f", lambda x: x * 2, (f32(8),)), subject_of("pellucid"))], "f", 0.01)
    assert found.counters == "the sandbox refuses; ask for them"
    assert "no hardware counters: the sandbox refuses; ask for them" in str(found)


def test_outliers_do_not_count():
    runs = [run_of(("k", at, at + 100), begin=at, end=at + 100) for at in range(0, 8000, 1000)]
    calls = [Call(at, at + 200) for at in range(0, 7000, 1000)] + [Call(7000, 99_000)]
    found = profile_of_runs(*runs, calls=calls)
    assert found.microseconds == 0.2 and found.kernels[0].total_microseconds == pytest.approx(0.1)


# ------------------------------------------------------------------------------------------------ beside eager mode


def row_of(name, total, nodes=(), lines=(), line_calls=(), calls=1.0):
    return KernelTime(name, "kernel", "g", name, calls, total, 0.0, total, 0.1,
                      fx_nodes=nodes, user_lines=lines, line_calls=line_calls)  # fmt: skip


def test_kernels_stand_beside_the_operators_that_they_replaced():
    ours = [
        row_of("gelu_add_0", 10.0, ("gelu_3", "add_1"), ("/m.py:1 (block)", "/m.py:2")),
        row_of("addmm_0", 30.0, ("addmm",), ("/m.py:1 (block)",)),
        row_of("sub_mul_0", 5.0, ("sub", "mul"), ("/m.py:9",)),
    ]
    theirs = [
        row_of("aten::gelu", 40.0, lines=("/m.py:1",), line_calls=(1.0,)),
        row_of("aten::add_", 60.0, lines=("/m.py:2", "/m.py:7"), line_calls=(3.0, 1.0)),  # line 7 is in no graph
        row_of("aten::addmm", 50.0, lines=("/m.py:1",), line_calls=(1.0,)),
        row_of("aten::batch_norm", 8.0, lines=("/m.py:9",), line_calls=(2.0,)),  # was decomposed
        row_of("aten::view", 1.0),
    ]
    sides = [
        Profile("b", "t", 1, 200.0, 0.0, 200.0, 1.0, 1, tuple(rows), Overhead(0.0, 0.0)) for rows in (ours, theirs)
    ]
    found = compare(*sides)
    assert {each.name: [(of.name, of.microseconds) for of in each.operators] for each in found.replaced} == {
        "gelu_add_0": [("aten::add_", 45.0), ("aten::gelu", 40.0)],
        "addmm_0": [("aten::addmm", 50.0)],
        "": [("aten::add_", 15.0), ("aten::view", 1.0)],
        "sub_mul_0": [("aten::batch_norm", 8.0)],
    }
    assert [each.theirs_microseconds for each in found.replaced] == [85.0, 50.0, 16.0, 8.0]
    assert "add_ 45.0, gelu 40.0" in str(found)
    assert not compare(sides[0], sides[0]).replaced


def test_operators_of_eager_mode_know_their_lines():
    def twice(x):
        y = x.exp()
        return y.exp().relu().sum()

    (found,) = take([program_of(Case("f", twice, (f32(8, 8),)), None)], "f", 0.01)
    (exp,) = [row for row in found.kernels if row.name == "aten::exp"]
    assert exp.line_calls == (1.0, 1.0) and len({line.rpartition(":")[2] for line in exp.user_lines}) == 2
    assert all(line.startswith(__file__) for line in exp.user_lines)
    (clamp,) = [row for row in found.kernels if row.name == "aten::clamp_min"]  # which relu calls
    assert clamp.user_lines and clamp.user_lines[0] in exp.user_lines


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.slow
def test_a_target_against_the_profile_of_a_run(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\ndef make():\n    return (lambda x: x.exp().sum(0)), (torch.ones(8, 8),)\n"
    )
    request = Request(f"{tmp_path / 'model.py'}:make")
    found = profile_target(request, trace=tmp_path / "trace.json", budget=0.1)
    assert isinstance(found, Profile) and (tmp_path / "trace.json").is_file()
    (tmp_path / "profile.json").write_text(json.dumps(plain(found)))
    again = profile_target(request, str(tmp_path), budget=0.1)
    assert (
        again.run == tmp_path.name and again.theirs == found and again.ours.kernels[0].bytes == found.kernels[0].bytes
    )


def test_a_folder_without_a_profile_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no profile"):
        profile_target(Request("nothing.py:make"), str(tmp_path))
    (tmp_path / "profile.json").write_text('{"kernels": [{"name": "<script>"}]}')
    with pytest.raises(UserError, match="is not a valid profile"):
        profile_target(Request("nothing.py:make"), str(tmp_path))
