"""What the commands of the kit print, of results made by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pellucid.kit.debug.bisect import Bisected, Tried
from pellucid.kit.debug.check import AGAIN, Checked, Culprit
from pellucid.kit.debug.cosim import Cosimulated
from pellucid.kit.debug.diff import Change, Changes
from pellucid.kit.debug.match import Matched, Matches
from pellucid.kit.debug.reasons import Reasons
from pellucid.kit.debug.simulation import COMPLETE, Difference, Unobserved
from pellucid.kit.diagnose import Diagnosis
from pellucid.kit.judge.judge import Judgement, Output, Verdict
from pellucid.kit.minify.result import Minified
from pellucid.kit.minify.trial import Kind
from pellucid.kit.process.child import Failure
from pellucid.kit.show import shown
from pellucid.kit.subjects.refusals import Refusal
from pellucid.printing import show

FILE = "/usr/lib/python3/site-packages/transformers/models/mobilebert/modeling_mobilebert.py:1038 (encoder.layer.11)"
KERNEL = "cpp_fused_add_mul_native_layer_norm_view_permute_clone_expand_17"


def output(name: str, error: float, allowed: float = 1.0, why: str = "differs") -> Output:
    bad = error > allowed
    verdict = Verdict.WRONG if bad else Verdict.ROUNDING if error else Verdict.OK
    return Output(name, (8,), "float32", Judgement(verdict, why if bad else "", error, allowed))


def terminal(found: object, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)
    show(console, shown(found))
    return console.file.getvalue().splitlines()


def checked(*outputs: Output, verdict: Verdict = Verdict.WRONG) -> Checked:
    return Checked("pellucid", verdict, outputs)


def test_the_worst_comes_first_and_buffers_last():
    text = str(checked(output("buffer mean", 9), output("output 0", 2), output("gradient of w", 5)))
    assert text.index("gradient of w") < text.index("output 0") < text.index("buffer mean")


def test_rows_that_are_fine_are_counted():
    good = [output(f"gradient of layer {number}", 0.5) for number in range(40)]
    text = str(checked(output("output 0", 2), output("output 1", 0), *good))
    assert "41 tensors good, 1 bit for bit equal" in text and "layer 7" not in text


def test_a_wrong_tensor_is_not_told_again_of_the_second_call():
    lines = str(
        checked(output("output 0", 2), output("output 0" + AGAIN, 2), output("output 1" + AGAIN, 3))
    ).splitlines()
    assert [line for line in lines if "output 0" in line] == ["    2        1    0  output 0"]
    assert "and 1 more" in lines and "0 tensors" not in lines[-1]
    assert any(line.startswith("again: a second call") for line in lines)


def test_no_legend_for_columns_that_are_not_there():
    text = str(checked(output("output 0", 0.5), verdict=Verdict.ROUNDING))
    assert "rms" not in text and "ulp" not in text and "(again)" not in text


def test_each_reason_of_a_changed_decision_has_its_sign():
    found = Changes("a", "b", (Change("decision", "graph: fusion of mm add", "one\ntwo", ""),))
    assert str(found).splitlines()[2:] == ["decision  graph: fusion of mm add", "          - one", "          - two"]


def test_the_ladder_of_bisect_is_printed_once():
    found = Bisected(
        "inductor", "codegen", None, checked(), (Tried("lowering", Verdict.OK), Tried("codegen", Verdict.WRONG))
    )
    assert str(found).splitlines() == [
        "at fault: codegen (inductor)",
        "used up to  verdict",
        "lowering    ok",
        "codegen     wrong",
    ]


def results() -> list[object]:
    """One of each kind whose rows have names of any length."""
    judged = Judgement(Verdict.WRONG, "58694 of 67120 elements differ", 5.4, 1e-5)
    return [
        checked(output("gradient of encoder.layer.11.attention.output.dense.weight.of.a.long.name", 5)),
        Checked("pellucid", Verdict.CRASH, (), None, step=Culprit("inference_0", KERNEL, "", ("add",) * 40, (FILE,))),
        Cosimulated("inductor", COMPLETE, Verdict.WRONG, (Difference("g", KERNEL, 0, "add_17", FILE, judged),), 3),
        Reasons(
            backend="pellucid", refusals=(Refusal("fusion", (KERNEL, KERNEL), "b12 is a reduction", (), FILE),) * 3
        ),
        Matches(
            "pellucid",
            (Matched("g", KERNEL, f"k_{KERNEL}", ("add",) * 40, ("add = aten.add",), (FILE,), "", 1, 0),),
            (),
        ),
        Changes("a", "b", (Change("kernel", "inference_0: " + "add " * 40, KERNEL, f"k_{KERNEL}"),)),
    ]


@pytest.mark.parametrize("found", results(), ids=lambda found: type(found).__name__)
def test_no_name_path_or_number_is_broken_at_80_columns(found):
    piped = str(found).split()
    assert not [word for line in terminal(found) for word in line.split() if word not in piped and "…" not in word]
    assert all(len(line) <= 80 for line in terminal(found) if KERNEL not in line)  # which stands alone on its line


def test_suspects_that_were_not_observed_stand_with_their_lines():
    judged = Judgement(Verdict.WRONG, "58694 of 67120 elements differ", 5.4, 1e-5)
    inside = tuple(Unobserved(f"neg_{number}", f"a.py:{number}") for number in range(6))
    found = Difference("g", KERNEL, 0, "add_17", "a.py:9", judged, inside)
    text = str(Cosimulated("pellucid", COMPLETE, Verdict.WRONG, (found,), 6))
    assert (
        "  neg_0 at a.py:0\n" in text and "neg_3 at a.py:3\n" in text and "neg_4" not in text and "and 2 more" in text
    )


def test_the_given_inputs_are_no_variation():
    assert "\n4 variations of the inputs tried too" in str(Checked("pellucid", Verdict.OK, tried=5))
    assert "\n1 variation of the inputs tried too" in str(Checked("pellucid", Verdict.OK, tried=2))
    assert "variation" not in str(Checked("pellucid", Verdict.OK))


def test_a_cause_is_told_once_with_how_often_it_was_met():
    lines = str(results()[3]).splitlines()
    assert lines[:3] == ["not fused", "times  cause, and an example", "    3  b12 is a reduction"]
    assert lines[3:] == [f"         {KERNEL}, {KERNEL}", f"         at {FILE}"]


def test_what_changed_reads_like_a_diff():
    assert str(results()[5]).splitlines()[:2] == ["- a", "+ b"]
    assert str(results()[5]).splitlines()[-2:] == [f"        - {KERNEL}", f"        + k_{KERNEL}"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_program_that_does_not_fail_alone_is_not_called_the_failure_alone(alone: bool):
    left = Minified("pellucid", Kind("wrong"), 9, 2, 30, 1.0, "graph", "repro.py", shown=alone)
    text = str(Diagnosis("model.py:make", "pellucid", checked(output("output 0", 2)), minified=left))
    assert ("the failure alone, 2 nodes" in text) is alone
    assert ("but it does not fail in the same way when run alone" in text) is not alone


def test_a_failure_leads_to_the_users_line_and_to_what_can_be_done():
    failure = Failure(
        "error", "InternalError", "lowering erf: KeyError: 1", context={"user line": "m.py:7", "hint": "x"}
    )
    for found in (Checked("pellucid", Verdict.ERROR, failure=failure), Reasons(backend="pellucid", failure=failure)):
        assert "  at m.py:7" in str(found) and "hint: x" in str(found)
