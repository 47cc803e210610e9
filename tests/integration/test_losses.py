"""Losses over many classes: right to rounding, and nothing of the size of the logits is kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integration import traced
from tests.support import assert_matches, widened

ROWS, CLASSES = 24, 67
TARGET = torch.arange(ROWS) * 7 % CLASSES
SOME_IGNORED = TARGET.where(TARGET % 3 > 0, -100)
WEIGHT = torch.linspace(0.1, 2, CLASSES)
SOFT = torch.linspace(-1, 1, ROWS * CLASSES).view(ROWS, CLASSES).sin().softmax(1)

Loss = Callable[..., Tensor]


def logits(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, CLASSES, generator=generator).mul(4).to(dtype).requires_grad_()


def gradients(loss: Loss, *args: Tensor) -> tuple[Tensor, ...]:
    """The loss, and the gradients of those arguments that have one."""
    leaves = [each.detach().requires_grad_(each.requires_grad) for each in args]
    result = loss(*leaves)
    result.backward(torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape).to(result.dtype))
    return result.detach(), *(each.grad for each in leaves if each.grad is not None)


def wide(loss: Loss, *args: Tensor) -> tuple[Tensor, ...]:
    return gradients(loss, *(widened(each.detach()).requires_grad_(each.requires_grad) for each in args))


def judge(loss: Loss, *args: Tensor, **options: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="pellucid", fullgraph=True, options={"verify": True}, **options)
    assert_matches(gradients(compiled, *args), gradients(loss, *args), wide(loss, *args))


def kept(loss: Loss, *args: Tensor) -> int:
    """Bytes that forward keeps for backward beside its arguments."""
    torch._dynamo.reset()
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        given = {each.untyped_storage().data_ptr() for each in (*args, SOFT)}
        if tensor.untyped_storage().data_ptr() not in given:
            sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.compile(loss, backend="pellucid")(*args)
    return sum(sizes)


def decisions(loss: Loss, folder: Path, *args: Tensor) -> list[dict[str, str]]:
    torch._dynamo.reset()
    gradients(torch.compile(loss, backend="pellucid", options={"trace": str(folder)}), *args)
    return traced.decisions(folder)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, TARGET),
        lambda x: F.cross_entropy(x, SOME_IGNORED, reduction="none"),
        lambda x: F.cross_entropy(x, SOME_IGNORED, WEIGHT.to(x), label_smoothing=0.1),
        lambda x: F.cross_entropy(x, SOME_IGNORED, label_smoothing=0.1, reduction="sum"),
        lambda x: F.cross_entropy(x, SOFT.to(x), WEIGHT.to(x)),
        lambda x: -x.log_softmax(1)[torch.arange(ROWS), TARGET - CLASSES].mean(),
        lambda x: -x.log_softmax(1).gather(1, TARGET[:, None]).sum(),
    ],
    ids=["plain", "ignored", "weights", "smooth", "soft", "indexed", "gathered"],
)
def test_losses_keep_numbers_of_rows(loss: Loss) -> None:
    judge(loss, logits())
    assert kept(loss, logits()) < 100 * ROWS


def test_a_batch_of_another_size() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, label_smoothing=0.1)

    compiled = torch.compile(loss, backend="pellucid", dynamic=True)
    for rows in (ROWS, 11):
        args = logits().detach()[:rows].requires_grad_(), SOME_IGNORED[:rows]
        assert_matches(gradients(compiled, *args), gradients(loss, *args), wide(loss, *args))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_computes_from_the_rounded_logits_that_forward_used(dtype: torch.dtype) -> None:
    """Were only backward's rounded, its rows would not sum to 1: three times eager's error."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 48, generator=generator).to(dtype).requires_grad_() for size in (ROWS, CLASSES))

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((F.linear(x, weight) * 1.25).float(), TARGET)

    judge(loss, x, weight)
    assert kept(loss, x, weight) < 100 * ROWS + ROWS * CLASSES * dtype.itemsize


def test_special_values() -> None:
    """A weight that is infinite reaches the rows of its class alone; eager's rules hold for infinite logits too."""
    weight = WEIGHT.index_fill(0, TARGET[:1], torch.inf)
    x = logits().detach()
    x[3, 5], x[4, 6], x[5] = torch.nan, torch.inf, -torch.inf
    judge(lambda x: F.cross_entropy(x, TARGET, weight.to(x), reduction="none"), x.requires_grad_())


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_class_out_of_range(wrong: int) -> None:
    target = TARGET.index_fill(0, torch.tensor(2), wrong)
    with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for dimension 1 with size {CLASSES}"):
        torch.compile(lambda x: F.cross_entropy(x, target), backend="pellucid")(logits())


def test_the_switch() -> None:
    loss = torch.compile(lambda x: F.cross_entropy(x, TARGET), backend="pellucid", options={"recompute": False})
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        loss(logits())
    assert ROWS * CLASSES * 4 in sizes


def refused(loss: Loss, folder: Path, *args: Tensor) -> list[str]:
    return [
        row["why"]
        for row in decisions(loss, folder, *args)
        if row["rule"] == "transform.keep-statistics" and row["ok"] == "0"
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda x: x.log_softmax(1), "it is a result and in memory anyway"),
        (lambda x: (x.softmax(1) @ x.t()).sum(), "reads it from memory, so it is there anyway"),
        (lambda x: x[:, :2].log_softmax(1).square().sum(), "two numbers of each row are no smaller than the row"),
        (lambda x: x.t().log_softmax(1).square().sum(), "its parts would have the strides of its input"),
        (lambda x: (x @ x.t()).softmax(1).square().sum(), "its input would be saved instead, which is as large"),
        (lambda x: x.softmax(1).square().sum(), "recomputing its exponentials takes longer than writing them"),
    ],
)
def test_what_is_kept_whole(loss: Loss, why: str, tmp_path: Path) -> None:
    assert any(why in each for each in refused(loss, tmp_path, logits()))
    judge(loss, logits())


ELEMENTS = torch.linspace(-1, 1, ROWS)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("scatter", "single"),
    [
        (lambda v: torch.zeros(ROWS, CLASSES).to(v).index_put((torch.arange(ROWS), TARGET), v), True),
        (lambda v: torch.full((ROWS, CLASSES), 3.0).to(v).index_put((torch.arange(ROWS), -1 - TARGET), v, True), True),
        (lambda v: torch.ones(2, 12, CLASSES).to(v).index_put((torch.arange(2)[:, None], torch.arange(12),
                                                               TARGET.view(2, 12)), v.view(2, 12)), True),
        (lambda v: torch.zeros(ROWS, CLASSES).to(v).index_put((TARGET % ROWS, torch.arange(ROWS)), v), False),
        (lambda v: torch.zeros(CLASSES, ROWS).to(v).index_put((TARGET % 3, TARGET % 2), v, True), False),
        (lambda v: torch.ones(ROWS, CLASSES).to(v).scatter(1, TARGET[:, None], v[:, None]), True),
        (lambda v: torch.ones(ROWS, CLASSES).to(v).scatter_add(1, TARGET.view(12, 2), v.view(12, 2)), False),
    ],
    ids=["put", "added", "two counted", "part of a column", "duplicates", "scatter", "several a row"],
)  # fmt: skip
def test_one_index_per_row_is_a_choice(scatter: Loss, single: bool, tmp_path: Path) -> None:
    def loss(v: Tensor) -> Tensor:
        return (scatter(v) * 2 - 1).exp()

    rows = decisions(loss, tmp_path, ELEMENTS.clone().requires_grad_())
    assert [row["ok"] == "1" for row in rows if row["rule"] == "lower.scatter"] == [single]
    judge(loss, ELEMENTS.clone().requires_grad_())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x)[:, :, -1] * 2,
        lambda x: x.softmax(-1)[:, :, :2] * 2,
        lambda x: x.softmax(-1)[0, 0, :2].softmax(0)[0] * 2,
        lambda x: x.logsumexp(-1)[:, 0, :3] * 2,
        lambda x: F.normalize(x, dim=-1)[..., 3:5] + 1,
    ],
)
def test_few_elements_of_what_is_reduced(function: Any) -> None:
    """Also where there is nothing to spare: of an attention, of whole rows, of the reductions themselves."""
    x = torch.randn(1, 4, 32, 16)
    with torch.no_grad():
        ours = torch.compile(function, backend="pellucid", options={"verify": True})(x)
        assert_matches(ours, function(x), function(x.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_loss_of_what_dropout_leaves(dtype: torch.dtype) -> None:
    """Dropout has two results, of which the loss reads one."""
    torch._dynamo.reset()

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(x * 2, 0.5), TARGET)

    torch.manual_seed(0)
    ours = gradients(torch.compile(loss, backend="pellucid"), logits(dtype))
    torch.manual_seed(0)
    torch.testing.assert_close(ours, gradients(loss, logits(dtype)))
