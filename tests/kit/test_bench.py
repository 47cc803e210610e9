"""The benchmark harness, on backends and functions small enough for a unit test."""

import dataclasses
import doctest
import importlib
import json
import math
import mmap
import re
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pellucid.bench import (
    MODELS,
    Case,
    Settings,
    Size,
    UnknownName,
    bench,
    build,
    compare,
)
from pellucid.errors import NotJudged, UserError
from pellucid.kit.bench import models, peers, startup
from pellucid.kit.bench.interleave import MIN_ROUNDS, interleave, run_slot
from pellucid.kit.bench.programs import operator_word, programs_of
from pellucid.kit.bench.results import Startup
from pellucid.kit.bench.startup import Request, cold_and_warm
from pellucid.kit.bench.subjects import check_subject, compiled
from pellucid.kit.bench.table import model_table
from pellucid.kit.judge.accuracy import error, gradient_error, is_accurate, tensors
from pellucid.kit.programs.graphs import case_in
from pellucid.kit.runs.run import open_run
from pellucid.kit.runs.target import Request as RunRequest
from pellucid.kit.stats import Summary, geometric_mean, pairwise_ratio, summarise
from pellucid.kit.subjects.registry import subject_of

TINY = Settings(subjects=("aot_eager",), cold=False, budget=0.05)


@pytest.mark.parametrize(
    "name", ["stats", "judge.accuracy", *(f"bench.{name}" for name in ("models", "harness", "programs", "subjects"))]
)
def test_the_examples_in_the_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(f"pellucid.kit.{name}"))
    assert result.attempted > 0 and result.failed == 0


# ----------------------------------------------------------------------------------------------- statistics


def test_quartiles_of_a_known_sample():
    summary = summarise([30.0, 10.0, 50.0, 20.0, 40.0])
    assert summary == Summary(median=30.0, q1=20.0, q3=40.0, count=5)
    assert summary.spread == pytest.approx(1 / 3)
    assert summarise([7.0]) == Summary(7.0, 7.0, 7.0, 1)
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_quartiles_are_ordered_and_within_the_sample(samples):
    s = summarise(samples)
    assert min(samples) <= s.q1 <= s.median <= s.q3 <= max(samples)


def test_a_ratio_by_pairs_is_blind_to_a_slow_stretch_of_the_machine():
    slowdown = [1.0, 1.0, 8.0, 8.0, 1.0, 3.0]
    ratio = pairwise_ratio([2.0 * s for s in slowdown], [1.0 * s for s in slowdown])
    assert ratio.median == 2.0 and ratio.spread == 0.0


def test_more_samples_make_a_median_less_uncertain():
    few, many = Summary(1.0, 0.9, 1.1, 4), Summary(1.0, 0.9, 1.1, 64)
    assert few.uncertainty == pytest.approx(4 * many.uncertainty)


def test_geometric_mean_of_a_doubling_and_a_halving_is_one():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------- accuracy


def test_the_error_is_the_worst_over_all_outputs():
    reference = [torch.tensor([3.0, -3.0]), torch.tensor([1.0, 1.0])]
    outputs = [torch.tensor([3.0, -3.3]), torch.tensor([1.0, 1.5])]
    assert error(outputs, reference) == pytest.approx(0.5)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("output", "reference", "expected"),
    [
        ([1.0, NAN, INF], [1.0, NAN, INF], 0.0),
        ([1.0, 0.0], [1.0, NAN], INF),
        ([1.0, NAN], [1.0, 0.0], INF),
        ([1.0, -INF], [1.0, INF], INF),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.25], [0.0], 0.25),
        ([], [], 0.0),
        ([1.0, 2.0], [1.0], INF),
    ],
)
def test_what_is_not_finite_must_stand_at_the_same_places(output, reference, expected):
    assert error([torch.tensor(output)], [torch.tensor(reference)]) == expected


def test_a_missing_output_is_an_infinite_error():
    assert error([], [torch.ones(2)]) == INF


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_beside_its_neighbours():
    reference = {"key.weight": torch.ones(1) * 2, "key.bias": torch.tensor([1e-17]), "value.bias": torch.ones(1)}
    assert gradient_error({**reference, "key.bias": torch.tensor([1e-6])}, reference) == pytest.approx(5e-7)
    assert gradient_error({**reference, "value.bias": torch.tensor([1.5])}, reference) == pytest.approx(0.5)


def test_a_missing_gradient_is_an_infinite_error():
    assert gradient_error({}, {"weight": torch.ones(2)}) == INF


def test_the_gradient_of_a_parameter_without_part_in_the_loss_may_be_zeros():
    assert gradient_error({"pooler.weight": torch.zeros(2)}, {}) == 0.0
    assert gradient_error({"pooler.weight": torch.ones(2)}, {}) == 1.0


def test_integers_and_booleans_have_errors_too():
    assert error([torch.tensor([250], dtype=torch.uint8)], [torch.tensor([250], dtype=torch.uint8)]) == 0.0
    assert error([torch.tensor([True, False])], [torch.tensor([True, True])]) == 1.0


def test_accurate_is_twice_eagers_error_and_a_few_roundings():
    assert is_accurate(2e-5, 1e-5, torch.float32)
    assert not is_accurate(2.2e-5, 1e-5, torch.float32)
    assert is_accurate(2e-7, 0.0, torch.float32)
    assert is_accurate(2e-2, 0.0, torch.bfloat16) and not is_accurate(2e-2, 0.0, torch.float32)


def test_outputs_are_found_in_any_nesting():
    a, b = torch.ones(1), torch.ones(2)
    assert [t.numel() for t in tensors({"x": (a, None), "y": [b, 3]})] == [1, 2]


# ------------------------------------------------------------------------------------------------- interleave


def test_rounds_rotate_and_every_subject_gets_as_many_slots(monkeypatch):
    monkeypatch.setattr("pellucid.kit.bench.interleave._calls_per_slot", lambda runner: 1)
    heard: list[float] = []
    order: list[str] = []
    runners = {name: partial(run_slot, lambda name=name: order.append(name)) for name in "abc"}
    slots = interleave(runners, budget=1e-6, on_round=heard.append)
    assert {name: len(s) for name, s in slots.items()} == dict.fromkeys("abc", MIN_ROUNDS)
    assert heard == sorted(heard) and heard[-1] == 1.0
    assert order[::3] == order[1::3] == order[2::3]  # two calls to settle, one to time
    assert "".join(order[::3]) == "abcbcacababcbca"


def test_a_slower_call_has_a_smaller_speed_up():
    def work(count):
        return partial(run_slot, lambda: sum(range(count)))

    slots = interleave({"fast": work(2_000), "slow": work(40_000)}, budget=0.3)
    ratio = pairwise_ratio([s.seconds for s in slots["fast"]], [s.seconds for s in slots["slow"]])
    assert ratio.median < 0.5


def test_page_faults_are_counted_per_call():
    pages = 2000

    def touch():
        with mmap.mmap(-1, pages * mmap.PAGESIZE) as fresh:
            for page in range(pages):
                fresh[page * mmap.PAGESIZE] = 1

    slots = interleave({"touch": partial(run_slot, touch), "idle": partial(run_slot, lambda: None)}, budget=0.05)
    assert summarise([s.faults for s in slots["idle"]]).median < 1
    assert summarise([s.faults for s in slots["touch"]]).median > pages / 2


# ------------------------------------------------------------------------------------------------- models


def test_every_small_workload_is_the_same_when_built_twice_and_leaves_the_random_state_alone():
    for name in (n for n, m in MODELS.items() if not m.sized and n != "softmax"):
        state = torch.random.get_rng_state()
        first, second = build(name), build(name)
        assert torch.equal(state, torch.random.get_rng_state())
        for key in first.kwargs:
            assert torch.equal(first.kwargs[key], second.kwargs[key])


def test_dtype_reaches_floating_inputs_only():
    size = Size(dtype=torch.bfloat16)
    assert {x.dtype for x in build("foo2", size).kwargs.values()} == {torch.bfloat16}
    assert {x.dtype for x in build("foo1", size).kwargs.values()} == {torch.uint8}


def test_float64_widens_a_copy_of_the_module():
    case = Case("own", torch.nn.Linear(3, 2), (), {"input": torch.ones(1, 3)})
    assert case_in(case, torch.float64)().dtype == torch.float64
    assert case().dtype == torch.float32


class Tiny(torch.nn.Module):
    """A linear layer with dropout, in the shape of a model that takes labels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.attention_dropout = torch.nn.Linear(3, 2), torch.nn.Dropout(0.5), 0.5
        self.config = SimpleNamespace(num_labels=2)

    def forward(self, pixel_values, labels=None):
        logits = self.dropout(self.linear(pixel_values))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits, labels), logits=logits)


@pytest.fixture
def tiny(monkeypatch):
    row = models.Model("tiny", lambda size: (Tiny(), {"pixel_values": torch.ones(size.batch, 3)}))
    monkeypatch.setitem(models.MODELS, "tiny", row)


def test_a_model_to_train_has_labels_and_no_dropout(tiny):
    case = build("tiny", Size(batch=4, train=True))
    assert case.fn.training and case.kwargs["labels"].shape == (4,)  # type: ignore[union-attr]
    assert case.fn.dropout.p == 0 and case.fn.attention_dropout == 0  # type: ignore[union-attr]
    assert "labels" not in build("tiny").kwargs


def test_a_training_step_returns_fresh_gradients_of_every_parameter(tiny):
    case = build("tiny", Size(batch=4, train=True))
    step = compiled(case, "aot_eager", train=True)
    first, again = step(), step()
    assert first.keys() == {"linear.weight", "linear.bias"}
    loss = case().loss
    expected = torch.autograd.grad(loss, list(case.fn.parameters()))  # type: ignore[union-attr]
    for gradients in (first, again):
        torch.testing.assert_close(list(gradients.values()), list(expected))


def test_training_is_judged_by_its_gradients(tiny):
    result = bench(["tiny"], dataclasses.replace(TINY, train=True, dynamic=True, batch=4)).models[0]
    assert result.train and result.dynamic and all(s.good for s in result.subjects)


def test_names_that_nobody_knows_are_refused_before_anything_runs():
    with pytest.raises(UnknownName, match=r"unknown model with parameters to train 'foo2': choose from bert"):
        bench(["foo2"], dataclasses.replace(TINY, train=True))
    with pytest.raises(UnknownName, match="unknown model 'bart': did you mean bert"):
        bench(["bart"], TINY)
    with pytest.raises(UnknownName, match=r"unknown backend 'indictor'.*inductor"):
        bench(["foo2"], Settings(subjects=("indictor",)))
    with pytest.raises(UnknownName, match="unknown dtype"):
        bench(["foo2"], Settings(dtype="f8"))


# ------------------------------------------------------------------------------------------------- words


def test_an_operator_is_called_with_what_its_word_says():
    (case,) = programs_of("aten.sum.dim_IntList(f32[3x4], [0, 1], keepdim=True, dtype=None)")
    torch.testing.assert_close(case(), case.args[0].sum((0, 1), keepdim=True))
    (gather,) = programs_of("aten.index_select(bf16[5x2], 0, i64[50]<5)")
    values, dim, index = gather.args
    assert values.dtype is torch.bfloat16 and dim == 0 and gather().shape == (50, 2)
    assert set(index.tolist()) == {0, 1, 2, 3, 4}
    (scalar,) = programs_of("aten.add(f64[], bool[2])")
    assert scalar.args[0].shape == () and scalar.args[1].dtype is torch.bool


def test_an_operator_has_the_same_numbers_each_time():
    word = operator_word("aten.bmm", "2x3x4, bf16[2x4x5]", "bf16")
    assert word == "aten.bmm(bf16[2x3x4], bf16[2x4x5])"
    (first,), (second,) = programs_of(word), programs_of(word)
    assert torch.equal(first(), second()) and first().shape == (2, 3, 5)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("aten.bnm(f32[2])", "PyTorch has no operator aten.bnm"),
        ("aten.relo(f32[2])", "did you mean aten.relu"),
        ("relu(f32[2])", "unknown operator relu"),
        ("aten.relu(q7[2])", "unknown dtype q7"),
        ("aten.relu(f32[2xq])", "f32[2xq] is not a tensor"),
        ("nothing.py:make", "there is no file nothing.py"),
        ("no/run", "is not a program"),
        ("bart", "unknown model 'bart'"),
    ],
)
def test_a_word_that_names_nothing(word, message):
    with pytest.raises((UserError, UnknownName), match=re.escape(message)):
        bench([word], TINY)


@pytest.mark.parametrize("settings", [TINY, dataclasses.replace(TINY, cold=True)], ids=["warm", "cold"])
def test_a_program_that_fails_in_eager_mode_is_not_judged(settings, monkeypatch):
    monkeypatch.setattr("pellucid.kit.bench.harness.cold_and_warm", None)  # no process is begun for it
    with pytest.raises(NotJudged, match="fails in eager mode"):
        bench(["aten.bmm(f32[2x3x4])"], settings)


@pytest.fixture
def target(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    return (lambda x, scale=1: x.add_(scale) * 2), (torch.zeros(8),), {'scale': 3}\n"
        "def module():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)), (torch.ones(2, 4),)\n"
        "def narrow():\n"
        "    return (lambda x: x @ torch.ones(4, 4)), (torch.ones(4),)\n"
    )
    return str(file)


def test_a_program_of_yours_begins_for_each_subject_with_the_inputs_that_you_gave(target):
    (result,) = bench([f"{target}:make"], TINY).models
    assert [(s.name, s.error, s.good) for s in result.subjects] == [("eager", 0.0, True), ("aot_eager", 0.0, True)]


def test_a_module_of_yours_is_trained_without_dropout(target):
    (result,) = bench([f"{target}:module"], dataclasses.replace(TINY, train=True)).models
    assert all(s.accurate for s in result.subjects)
    with pytest.raises(UserError, match="has no parameters to train"):
        bench([f"{target}:make"], dataclasses.replace(TINY, train=True))


def test_a_program_that_no_float64_can_judge_is_timed(target):
    (result,) = bench([f"{target}:narrow"], TINY).models
    assert all(s.seconds is not None and s.error is None and s.accurate is None and s.good for s in result.subjects)


def test_a_program_of_yours_has_its_own_sizes(target):
    with pytest.raises(UserError, match="has its own sizes"):
        bench([f"{target}:make"], dataclasses.replace(TINY, batch=2))


@pytest.mark.slow
def test_graphs_and_kernels_of_a_run(target, tmp_path):
    from pellucid.kit.debug.capture import capture

    folder = tmp_path / "run"
    capture(RunRequest(f"{target}:module"), folder)
    (graph,) = programs_of(str(folder))
    assert graph.name == f"{folder}:inference_0" and torch.is_tensor(graph()[0])
    step = next(step for step in subject_of("pellucid").compile(open_run(folder).graph("inference_0")).steps)
    (result,) = bench([f"{folder}:inference_0:{step.name}"], TINY).models
    assert all(s.good and s.seconds is not None for s in result.subjects)
    with pytest.raises(UserError, match="has no kernel nothing"):
        programs_of(f"{folder}:inference_0:nothing")


# ------------------------------------------------------------------------------------------------- subjects


def test_a_backend_is_given_its_options():
    case = Case("double", lambda x: x + x, (torch.ones(4),))
    _, scalar = compare(case, Settings(subjects=("pellucid:vectorize=False",), budget=0.05)).subjects
    assert scalar.good and scalar.kernels == 1
    with pytest.raises(UserError, match="no_such"):
        compare(case, Settings(subjects=("pellucid:no_such=1",)))
    with pytest.raises(UnknownName, match="unknown backend 'pelucid': did you mean pellucid"):
        compare(case, Settings(subjects=("pelucid",)))
    with pytest.raises(UserError, match="'freezing' is not KEY=VALUE"):
        bench(["foo2"], Settings(subjects=("inductor:freezing",)))


@pytest.fixture
def engine(monkeypatch):
    """An engine that need not be installed, and one that cannot be."""

    def no_converter(case, folder):
        raise NotImplementedError("aten::foo")

    monkeypatch.setitem(peers.PEERS, "engine", peers.Peer(("torch",), no_converter, lambda *_: None))
    monkeypatch.setitem(peers.PEERS, "absent", peers.Peer(("no_such_package",), no_converter, lambda *_: None))


def test_what_another_engine_cannot_do_is_a_finding(engine):
    (result,) = bench(["foo2"], Settings(subjects=("engine", "aot_eager"), budget=0.05, cold=False)).models
    assert [s.good for s in result.subjects] == [True, False, True]
    assert "NotImplementedError: aten::foo" in str(result.subjects[1].failure)


def test_another_engine_must_be_installed_and_cannot_train(engine):
    with pytest.raises(UserError, match="absent needs no_such_package") as missing:
        bench(["foo2"], Settings(subjects=("absent",)))
    assert "pellucid[peers]" in missing.value.hint
    with pytest.raises(UserError, match="engine cannot train"):
        bench(["bert"], Settings(subjects=("engine",), train=True))


def test_a_thread_of_its_own_waits_for_another_engine(monkeypatch):
    heard = []

    class FakeWorker:
        def call(self, *_):
            heard.append(threading.current_thread())

        pause = close = call

    monkeypatch.setattr(peers, "Worker", FakeWorker)
    monkeypatch.setattr(peers, "_convert", lambda *_: None)
    engine = peers.Engine("engine", Case("double", lambda x: x + x, (torch.ones(4),)), {})
    engine.slot(3)
    assert len(heard) == 4 and len(set(heard)) == 1 and threading.current_thread() not in heard
    engine.close()
    assert not heard[0].is_alive()


# ------------------------------------------------------------------------------------------------- the whole


def test_a_small_run_measures_everything():
    progress = []
    report = bench(["foo2"], TINY, lambda doing, done: progress.append((doing, done)))
    (model,) = report.models
    assert [s.name for s in model.subjects] == ["eager", "aot_eager"]
    for s in model.subjects:
        assert s.good and s.accurate and s.error is not None and s.error < 1e-6
        assert s.seconds is not None and s.seconds.count == model.rounds >= MIN_ROUNDS
        assert s.faults is not None and s.first_seconds is not None
        assert s.cold is None and s.kernels is None
    assert model.subjects[0].speedup == Summary(1.0, 1.0, 1.0, model.rounds)
    fractions = [done for _, done in progress]
    assert fractions == sorted(fractions) and 0 <= fractions[0] <= fractions[-1] <= 1


@pytest.mark.sampled
def test_several_programs_have_a_process_each(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import os, torch\n"
        "def make():\n"
        f"    open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "    return torch.relu, (torch.ones(4),)\n"
    )
    progress, measured = [], []
    words = ["foo2", f"{file}:make", f"{file}:make"]
    report = bench(words, TINY, lambda doing, done: progress.append(done), lambda one: measured.append(len(progress)))
    assert len(measured) == 3 and 0 < measured[0] < measured[1] < measured[2] == len(progress), "each at once"
    assert len(report.models) == 3 and all(s.accurate for model in report.models for s in model.subjects)
    assert len(set((tmp_path / "pids").read_text().split())) == 3, "two, and this one, which looks whether it exists"
    assert progress == sorted(progress) and progress[-1] <= 1
    with pytest.raises(models.DoesNotFit):
        bench(["foo2", "bert"], dataclasses.replace(TINY, seq=100_000))
    file.write_text("import os\ndef make():\n    return (lambda x: os._exit(3)), (1,)\n")
    with pytest.raises(NotJudged, match="its process ended with status 3"):
        bench(["foo2", f"{file}:make"], TINY)


def test_a_failing_backend_is_a_finding_and_the_others_go_on():
    result = compare(
        Case("relu", lambda x: torch.relu(x), (torch.ones(4),)),
        Settings(subjects=("relu_compile_error_TESTING_ONLY", "aot_eager"), budget=0.05),
    )
    eager, failing, other = result.subjects
    assert eager.good and other.good
    assert not failing.good and failing.failure is not None and "ReluCompileError" in failing.failure


def test_a_wrong_result_is_a_finding():
    result = compare(
        Case("relu", lambda x: torch.relu(x), (torch.ones(4),)),
        Settings(subjects=("relu_accuracy_error_TESTING_ONLY",), budget=0.05),
    )
    wrong = result.subjects[1]
    assert wrong.failure is None and wrong.accurate is False and not wrong.good


def test_a_program_that_fails_in_eager_mode_is_the_callers_error():
    def broken(x):
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        compare(Case("broken", broken, (torch.ones(1),)), TINY)


def test_counts_are_those_of_the_compilations_that_were_added(monkeypatch):
    from types import ModuleType, SimpleNamespace

    from pellucid.kit.bench.subjects import Counter, Counts

    done = [SimpleNamespace(kernels=100, fallbacks=100)]
    backend = ModuleType("pellucid.backend")
    backend.last_compilations = lambda: list(done)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pellucid.backend", backend)
    counter = Counter("pellucid")
    done += [SimpleNamespace(kernels=3, fallbacks=1), SimpleNamespace(kernels=2, fallbacks=0)]
    assert counter.counts() == Counts(kernels=5, fallbacks=1)
    assert Counter("inductor").counts() is None


def test_fallbacks_are_listed_with_their_share_of_the_time():
    own = Case("product", lambda x: torch.relu(x @ x[:, ::2] + 1), (torch.ones(500, 500),))
    result = compare(own, Settings(subjects=("pellucid",), budget=0.05, fallbacks=True))
    assert result.subjects[0].fallback_times is None and result.subjects[1].fallback_times is not None
    (product,) = result.subjects[1].fallback_times
    assert (product.op, product.calls) == ("aten::mm.out", 1) and "matrix multiplication" in product.reason
    assert 0.3 < product.share < 1
    console = Console(width=80)
    with console.capture() as shown:
        console.print(model_table(result))
    assert "mm.out" in shown.get() and "multiplication" in shown.get()


def test_where_nothing_is_left_to_aten_that_is_said():
    own = Case("exp", torch.exp, (torch.ones(50),))
    result = compare(own, Settings(subjects=("pellucid",), budget=0.05, fallbacks=True))
    console = Console(width=80)
    with console.capture() as shown:
        console.print(model_table(result))
    assert "nothing is left to ATen" in shown.get()
    assert "nothing is left to ATen" in str(result) and "vs eager" in str(result)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("inductor:freezin=True", "freezing"),
        ("pellucid:freez=True", "freeze"),
        ("pelucid", "pellucid"),
        ("pellucid:guard_filter_fn=skip", "skip_all_guards_unsafe"),
        ("aot_eager:exported=True", "only pellucid and inductor support exported programs"),
        ("pellucid:exported=True,guard_filter_fn=skip_all_guards_unsafe", "has no guards to filter"),
    ],
)
def test_a_subject_with_a_slip_of_the_pen_is_refused_before_anything_runs(text, hint):
    with pytest.raises((UserError, UnknownName)) as found:
        check_subject(text)
    assert hint in f"{found.value} {getattr(found.value, 'hint', '')}"


def test_a_filter_of_guards_goes_to_torch_compile_under_its_name():
    unguarded = "pellucid:guard_filter_fn=skip_all_guards_unsafe"
    check_subject(unguarded)
    case = Case("flat", torch.nn.Flatten(1, 2), (torch.ones(2, 3, 5, 7),))
    guarded, filtered = compiled(case, "pellucid"), compiled(case, unguarded)
    with torch.no_grad():
        assert guarded().shape == filtered().shape == (2, 15, 7)
        case.fn.end_dim = 3
        assert guarded().shape == (2, 105)
        assert filtered().shape == (2, 15, 7)  # what no guard looks at goes unnoticed


@pytest.mark.parametrize(
    "subject",
    ["pellucid:exported=True,freeze=True", pytest.param("inductor:exported=True", marks=pytest.mark.slow)],
)
def test_an_exported_program_is_measured_without_dynamo(subject):
    check_subject(subject)
    with pytest.raises(UserError, match="cannot be trained"):
        check_subject(subject, train=True)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU()).eval()
    call = compiled(Case("linear", model, (torch.ones(2, 5),)), subject)
    with torch._dynamo.config.patch(disable=True), torch.no_grad():
        (result,) = call()
        torch.testing.assert_close(result, model(torch.ones(2, 5)))


def test_a_program_that_does_not_repeat_itself_is_not_measured(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        "import itertools, torch\ncalls = itertools.count(1)\ndef make():\n"
        "    return (lambda x: x * next(calls)), (torch.ones(9),)\n"
    )
    with pytest.raises(NotJudged, match="is not deterministic"):
        bench([f"{file}:make"], Settings(subjects=("pellucid",)))


def test_arguments_that_an_operator_does_not_take_are_told_with_those_that_it_takes():
    with pytest.raises(
        NotJudged, match=r"Unknown keyword argument 'alph'.*aten::add\.Tensor\(Tensor self, Tensor other"
    ):
        bench(["aten.add(f32[3], f32[3], alph=2)"], Settings(subjects=("aot_eager",), cold=False))


def test_an_operator_without_its_library_is_told_where_it_is():
    with pytest.raises(UserError, match=r"did you mean aten\.relu"):
        programs_of(operator_word("relu", "3", "f32"))


@pytest.mark.parametrize("part", ["", ":inference_0", ":inference_0:addmm_gelu_0"])
def test_a_profile_that_is_taken_for_a_run_is_called_a_profile(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    with pytest.raises(UserError, match=r"before is not a run: it has no run\.json"):
        programs_of(f"before{part}")
    (tmp_path / "before" / "profile.json").touch()
    with pytest.raises(UserError, match=r"before is a profile, .*, and not a run: it has no graphs") as found:
        programs_of(f"before{part}")
    assert "pellucid capture" in found.value.hint


def test_a_run_that_is_not_there_is_named():
    with pytest.raises(UserError, match="there is no folder no_such"):
        programs_of("no_such:inference_0:add_0")


# ------------------------------------------------------------------------------------------------- start-up


def test_each_child_gets_the_same_fresh_cache_folders(monkeypatch):
    seen = []

    def child(command, env, **rest):
        seen.append([env[name] for name in startup.CACHE_VARIABLES])
        with open(command[-1], "w") as answer:
            json.dump({"seconds": 1.0, "built_bytes": 1, "peak_bytes": 2}, answer)
        return startup.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(startup.subprocess, "run", child)
    request = Request("foo2", "aot_eager", 1, 128, "f32")
    cold_and_warm(request), cold_and_warm(request)
    assert seen[0] == seen[1] and seen[2] == seen[3] and not set(seen[0]) & set(seen[2])


@pytest.mark.parametrize(
    ("status", "stderr", "expected"),
    [
        (-11, "", "killed by SIGSEGV"),
        (1, "Traceback\nKeyError: 'x'\n", "KeyError: 'x'"),
        (3, "", "exit status 3"),
    ],
)
def test_a_child_that_dies_is_a_result(monkeypatch, status, stderr, expected):
    died = startup.subprocess.CompletedProcess([], status, "", stderr)
    monkeypatch.setattr(startup.subprocess, "run", lambda *a, **k: died)
    cold, warm = cold_and_warm(Request("foo2", "aot_eager", 1, 128, "f32"))
    assert cold == Startup(failure=expected) and warm is None


def test_a_child_that_hangs_is_a_result():
    cold, warm = cold_and_warm(Request("pointwise_small", "aot_eager", 1, 128, "f32"), timeout=0.05)
    assert cold.failure == "no result within 0.05 s" and warm is None
