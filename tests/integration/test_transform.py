"""What changes an FX graph before it is lowered: copies that are not made, and equal calls that are made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pellucid.capture.transform import transform
from pellucid.capture.verify_views import verify_views
from pellucid.errors import InternalError
from tests.support import check


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def test_copies_that_nobody_can_tell_from_their_originals_are_not_made() -> None:
    def inside(x: Tensor) -> Tensor:
        y = x.sin()
        return y.clone() * x.roll(1, 0) + y.clone()

    def apart(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return y, y.clone(), y.t().clone(memory_format=torch.contiguous_format).exp(), x.clone()

    x = torch.randn(33, 65)
    for function, copies in ((inside, 0), (apart, 3)):
        graph, _ = transform(make_fx(function, tracing_mode="fake")(x))
        assert sum(node.target is torch.ops.aten.clone.default for node in graph.graph.nodes) == copies
    check(inside, (x,))
    results = check(apart, (x,))(x)
    assert len({tensor.data_ptr() for tensor in (x, *results)}) == 5


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_a_copy_begin_where_the_copy_does(dynamic: bool) -> None:
    """Its original may begin elsewhere in its memory; copies of copies, and dropout that does nothing, are copies."""

    def cut(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        once = F.linear(F.dropout(x[:, 3:9], 0.5, training=False), w)
        twice = x[:, 2:8].clone().clone()
        turned = x.transpose(0, 1)[4:].clone().transpose(0, 1)[:, 1:]
        return once, twice.view(6, 16) @ w, twice.flatten().exp(), x[:, 5:].clone() * 2, turned + 1

    check(cut, (torch.randn(1, 12, 16), torch.randn(16, 16)), dynamic=dynamic)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (lambda x: x[2:4], r"captured as \[\(\(12,\), \(1,\), 0\)\].*they are \[\(\(12,\), \(1,\), 12\)\]"),
        (lambda x: x.t(), "has no such view"),
    ],
    ids=["slice", "transposed"],
)
def test_a_pass_that_moves_what_a_view_is_of_is_noticed(source: Callable[[Tensor], Tensor], told: str) -> None:
    """By the option `verify`: here a copy is left out that must be made."""

    def view_of_copy(x: Tensor) -> Tensor:
        return source(x).clone(memory_format=torch.contiguous_format).view(-1)

    graph = make_fx(view_of_copy, tracing_mode="fake")(torch.randn(4, 6)).graph
    verify_views(graph)
    (copy,) = (node for node in graph.nodes if node.target is torch.ops.aten.clone.default)
    copy.replace_all_uses_with(copy.args[0])
    with pytest.raises(InternalError, match=f"view.*{told}"):
        verify_views(graph)


def test_copies_stay_where_something_changes_the_original() -> None:
    def swap(x: Tensor, y: Tensor) -> Tensor:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)
        return (x * 2).clone() + kept

    check(swap, (torch.randn(7, 5), torch.randn(7, 5)))


def test_random_numbers_change_no_tensor() -> None:
    def layers(x: Tensor, bias: Tensor) -> Tensor:
        for _ in range(3):
            x = F.scaled_dot_product_attention(x, x, x, bias.permute(2, 0, 1).contiguous())
        return x

    def drawn(x: Tensor) -> tuple[Tensor, ...]:
        first, one = x.t().contiguous().sin(), torch.rand_like(x)
        second, other = x.t().contiguous().sin(), torch.rand_like(x)
        return first + one.t(), second + other.t()

    def written(x: Tensor) -> Tensor:
        first = x.sin()
        x.add_(1)
        return first + x.sin()

    args, square = (torch.randn(1, 8, 16, 32), torch.randn(16, 16, 8)), (torch.randn(33, 33),)
    for function, given, target, calls in (
        (layers, args, torch.ops.aten.clone.default, 1),
        (drawn, square, torch.ops.aten.sin.default, 1),
        (drawn, square, torch.ops.aten.rand_like.default, 2),
        (written, square, torch.ops.aten.sin.default, 2),
    ):
        with torch.no_grad():
            graph, _ = transform(make_fx(function, tracing_mode="fake")(*(each.clone() for each in given)))
        assert sum(node.target is target for node in graph.graph.nodes) == calls, (function, target)
    with torch.no_grad():
        check(layers, args)
        check(drawn, square)
        check(written, square)


def test_equal_calls_of_an_operator_of_a_user_are_all_made() -> None:
    @torch.library.custom_op("pellucid_tests::noise", mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return torch.rand_like(x)  # no tag says that

    noise.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: (noise(x) - noise(x), torch.rand(3)), backend="pellucid")
    x = torch.randn(5, 7)
    with torch.no_grad():
        torch.manual_seed(0)
        difference, after = compiled(x)
        torch.manual_seed(0)
        assert torch.equal(difference, torch.rand_like(x) - torch.rand_like(x)) and torch.equal(after, torch.rand(3))

        layer = torch.nn.Linear(7, 3)
        frozen = torch.compile(lambda x: x @ noise(layer.weight).t(), backend="pellucid", options={"freeze": True})
        for seed in (1, 2):  # nor are they made once for all calls
            torch.manual_seed(seed)
            product = frozen(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(product, x @ torch.rand_like(layer.weight).t())
