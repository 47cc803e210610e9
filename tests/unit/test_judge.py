"""Wrong, or only rounded: values that are not finite, integers that float64 has not, and tensors of several parts."""

from __future__ import annotations

import math

import pytest
import torch

from pellucid.kit.judge.judge import Verdict, close, judge, tolerance, worst

NAN, INF = math.nan, math.inf


def verdict(actual: list[float], eager: list[float], exact: list[float], *draws: list[float]) -> Verdict:
    a, e, *others = (torch.tensor(each) for each in (actual, eager, *draws))
    return judge(a, e, torch.tensor(exact, dtype=torch.float64), others).verdict


@pytest.mark.parametrize(("actual", "eager", "exact", "draws", "expected"), [
    ([1.0, NAN], [1.0, NAN], [1.0, NAN], [], Verdict.OK),
    ([1.0, NAN], [1.0, 2.0], [1.0, 2.0], [], Verdict.WRONG),
    ([1.0, 2.0], [1.0, NAN], [1.0, NAN], [], Verdict.WRONG),
    ([1.0, 2.0], [1.0, NAN], [1.0, 2.0], [], Verdict.ROUNDING),  # as float64 has it
    ([1.0, NAN], [1.0, 2.0], [1.0, 2.0], [[1.0, NAN]], Verdict.ROUNDING),  # eager itself, a rounding away
    ([1.0, INF], [1.0, -INF], [1.0, -INF], [], Verdict.WRONG),
    ([1.0, INF], [1.0, 3e38], [1.0, 3.5e38], [], Verdict.WRONG),
    ([1.0, 1.001], [1.0, 1.0], [1.0, 1.0], [], Verdict.WRONG),
    ([1.0, 1.001], [1.0, 1.0], [1.0, 1.0], [[1.0, 1.002]], Verdict.ROUNDING),
    ([0.0, 1.0], [-0.0, 1.0], [0.0, 1.0], [], Verdict.OK),
    ([0.0, 0.0], [0.0, -1.4e-45], [0.0, -1e-46], [], Verdict.ROUNDING),  # neighbours: there is nothing between them
])  # fmt: skip
def test_float64_decides(actual, eager, exact, draws, expected):
    assert verdict(actual, eager, exact, *draws) is expected


def test_a_number_may_be_rounded_to_an_infinity_near_the_end_of_float16():
    eager, exact = torch.tensor([1, 65312], dtype=torch.float16), torch.tensor([1.0, 65320], dtype=torch.float64)
    for value, good in ((INF, True), (-INF, False), (NAN, False)):
        actual = torch.tensor([1, value], dtype=torch.float16)
        assert judge(actual, eager, exact).verdict.good is good
        assert not judge(actual, eager / 2, exact / 2).verdict.good


@pytest.mark.parametrize(("dtype", "right", "wrong"), [
    (torch.int64, 2**60, 2**60 + 1),
    (torch.uint8, 255, 254),
    (torch.bool, False, True),
])  # fmt: skip
def test_integers_are_compared_exactly(dtype, right, wrong):
    eager, other = (torch.tensor([0, each, 1]).to(dtype) for each in (right, wrong))
    assert judge(eager.clone(), eager, eager).verdict is Verdict.OK
    found = judge(other, eager, eager)
    assert (found.verdict, found.where, found.bad_elements, found.max_error) == (Verdict.WRONG, (1,), 1, 1.0)


def test_the_text_has_integers_in_full():
    eager = torch.tensor([2**60])
    assert f"{2**60 + 1}, eager {2**60}" in judge(eager + 1, eager, eager).why


def test_a_complex_number_is_a_pair():
    eager = torch.tensor([1 + 1j, 2 - 3j])
    found = judge(eager.conj(), eager, eager.to(torch.complex128))
    assert (found.verdict, found.bad_elements, found.where) == (Verdict.WRONG, 2, (1, 1))
    assert judge(eager * (1 + 1e-7), eager, eager.to(torch.complex128)).verdict.good


@pytest.mark.parametrize("bad", [0, 299_999, 600_000, 999_999])
@pytest.mark.parametrize("value", [2.0, NAN])
def test_the_worst_element_of_a_large_tensor(bad, value):
    eager = torch.ones(1000, 1000)
    actual = eager.clone()
    actual.view(-1)[[bad, -1]] = torch.tensor([value, value])
    actual.view(-1)[500_000] = 1.0000001  # also rounded
    found = judge(actual.t().contiguous().t(), eager, eager.double())
    assert found.verdict is Verdict.WRONG and found.where == divmod(bad, 1000)
    assert found.bad_elements == len({bad, 999_999})


def test_an_empty_tensor_and_one_without_dimensions():
    assert judge(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3).double()).verdict is Verdict.OK
    assert judge(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(1.0).double()).where == ()


def test_results_that_are_close_need_no_float64():
    eager = torch.randn(3000, 1000)
    assert close(eager, eager.clone()) is not None
    assert close(eager * (1 + 2e-7), eager) is not None
    for other in (eager * 1.001, torch.full_like(eager, NAN), eager.double(), eager[1:]):
        assert close(other, eager) is None


def test_what_a_test_allows_is_what_the_judge_allows():
    eager, exact, draw = torch.ones(4), torch.ones(4).double(), torch.full((4,), 1.00001)
    bound = tolerance(eager, exact, [draw])
    assert judge(eager + bound * 0.7, eager, exact, [draw]).verdict.good
    assert not judge(eager + bound * 1.3, eager, exact, [draw]).verdict.good


def test_what_only_the_draws_allow_is_not_said_to_be_good():
    exact = torch.randn(100, dtype=torch.float64)
    eager = exact.float()
    draws = [eager + 0.5, eager - 0.5]  # a judge that changed the wrong thing, or a program that amplifies roundings
    found = judge(eager * 1.1, eager, exact, draws)
    assert found.verdict is Verdict.UNSURE and not found.verdict.good and not found.verdict.bad
    assert judge(eager * (1 + 1e-6), eager, exact, draws).verdict is Verdict.ROUNDING
    assert worst([Verdict.ROUNDING, Verdict.UNSURE]) is Verdict.UNSURE
    assert worst([Verdict.UNSURE, Verdict.WRONG]) is Verdict.WRONG


def test_a_threshold_may_be_crossed_where_the_draws_cross_it_and_not_everywhere():
    exact = torch.ones(100, dtype=torch.float64)
    eager, drawn, crossed = (exact.float() for _ in range(3))
    drawn[3], crossed[7] = -1, -1
    assert judge(crossed, eager, exact, [drawn]).verdict is Verdict.ROUNDING
    assert judge(-eager, eager, exact, [drawn]).verdict is Verdict.UNSURE
    assert judge(crossed > 0, eager > 0, exact > 0, [drawn > 0]).verdict is Verdict.ROUNDING
    assert judge(eager < 0, eager > 0, exact > 0, [drawn > 0]).verdict is Verdict.UNSURE
    assert judge(eager[0] < 0, eager[0] > 0, exact[0] > 0, [eager[0] < 0]).verdict is Verdict.ROUNDING  # one decision
