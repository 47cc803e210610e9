"""`interpolate` and its gradients: kernels that gather along one axis after the other, as exact as eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pellucid.ir.nodes import Kernel
from tests.support import assert_matches, check, compiled, recorded, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
LAST = torch.channels_last
RESIZES: dict[str, dict[str, Any]] = {
    "nearest, twice": {"mode": "nearest", "scale_factor": 2.0},
    "nearest, five and three times": {"mode": "nearest", "scale_factor": (5.0, 3.0)},
    "nearest, of every third": {"mode": "nearest", "scale_factor": (1 / 3, 1.0)},
    "nearest, one way each": {"mode": "nearest", "size": (41, 9)},
    "nearest, the same": {"mode": "nearest", "size": (14, 19)},
    "exact": {"mode": "nearest-exact", "size": (23, 8)},
    "exact, twice": {"mode": "nearest-exact", "scale_factor": 2.0},
    "linear, twice": {"mode": "bilinear", "scale_factor": 2.0},
    "linear, three and four times": {"mode": "bilinear", "scale_factor": (3.0, 4.0)},
    "linear, half": {"mode": "bilinear", "scale_factor": 0.5},
    "linear, a fraction": {"mode": "bilinear", "scale_factor": (1.7, 0.45)},
    "linear, corners": {"mode": "bilinear", "scale_factor": 2.0, "align_corners": True},
    "linear, the same": {"mode": "bilinear", "size": (14, 19)},
    "linear, to one": {"mode": "bilinear", "size": (1, 1), "align_corners": True},
    "linear, to one line": {"mode": "bilinear", "size": (1, 40), "align_corners": True},
    "linear, one way each": {"mode": "bilinear", "size": (3, 131)},
    "cubic, twice": {"mode": "bicubic", "scale_factor": 2.0},
    "cubic, half": {"mode": "bicubic", "scale_factor": 0.5},
    "cubic, corners": {"mode": "bicubic", "size": (29, 50), "align_corners": True},
    "cubic, a third and a fraction": {"mode": "bicubic", "scale_factor": (1 / 3, 2.3)},
}
SHAPES = ((2, 3, 14, 19), (1, 20, 14, 19))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


def image(*shape: int, last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(shape).to(dtype)
    return x.contiguous(memory_format=LAST) if last else x


def resized(how: dict[str, Any]) -> Any:
    return lambda x: F.interpolate(x, **how)


def gradients(function: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a weighted sum of results."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    function(x).backward(weight.to(x.dtype))
    assert x.grad is not None
    return x.grad


def check_gradient(function: Any, run: Any, x: torch.Tensor, weight: torch.Tensor | None = None) -> None:
    weight = torch.randn_like(function(x)) if weight is None else weight
    found, theirs = (gradients(call, x, weight) for call in (run, function))
    assert_matches(found, theirs, gradients(function, widened(x), weight))


@pytest.mark.parametrize("last", [False, True], ids=["planar", "channels-last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RESIZES)
def test_results_and_gradients(name: str, shape: tuple[int, ...], last: bool) -> None:
    function, x = resized(RESIZES[name]), image(*shape, last=last)
    check(function, (x,))
    torch._dynamo.reset()
    with recorded() as graphs:
        check_gradient(function, compiled(function), x)
    programs = [program for graph in graphs for program in graph.programs]
    nodes = [node for program in programs for node in program.scheduled.nodes]
    kernels = [node for node in nodes if isinstance(node, Kernel)]
    stores = [store for kernel in kernels for _, store in kernel.stores()]
    assert stores and not any(store.join for store in stores)  # nothing scatters
    assert len(kernels) == len(nodes)  # ATen computes nothing


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["nearest, twice", "linear, twice", "linear, a fraction", "cubic, half", "exact"])
def test_other_types(name: str, dtype: torch.dtype) -> None:
    function, x = resized(RESIZES[name]), image(2, 3, 14, 19, dtype=dtype)
    check(function, (x,))
    torch._dynamo.reset()
    check_gradient(function, compiled(function), x)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_bytes_are_computed_as_eager_does(mode: str) -> None:
    """Which is in whole numbers."""
    x = torch.randint(0, 256, (1, 3, 14, 19), dtype=torch.uint8)
    check(lambda x: F.interpolate(x, size=(31, 25), mode=mode), (x,))


@pytest.mark.parametrize(
    "name", ["nearest, twice", "linear, twice", "linear, half", "linear, a fraction", "cubic, twice"]
)
@pytest.mark.parametrize("place", [(0, 0), (0, 1), (7, 18), (13, 17)], ids=str)
def test_what_is_not_finite_stays_where_eager_has_it(name: str, place: tuple[int, int]) -> None:
    """A weight of zero makes NaN of an infinity."""
    function, x = resized(RESIZES[name]), image(1, 2, 14, 19)
    x[0, 1][place] = torch.inf
    run = compiled(function)
    assert torch.equal(run(x).isfinite(), function(x).isfinite())
    weight = torch.randn_like(function(x))
    for line, pixel in ((0, 0), (0, 1), (weight.shape[2] - 1, weight.shape[3] // 2)):
        infinite = weight.clone()
        infinite[0, 0, line, pixel] = torch.inf
        found, theirs = (gradients(call, x, infinite) for call in (run, function))
        assert torch.equal(found.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("last", [False, True], ids=["planar", "channels-last"])
@pytest.mark.parametrize("size", [(1, 3), (4, 3), (2, 5), (2, 3)], ids=str)
def test_an_axis_that_keeps_its_size_weighs_by_zero_too(size: tuple[int, int], last: bool) -> None:
    function, x = resized({"mode": "bilinear", "size": size}), torch.ones(1, 20, 2, 3)
    x[0, 0, 0, 0] = torch.inf
    x = x.contiguous(memory_format=LAST) if last else x
    run = compiled(function)
    assert torch.equal(run(x).nan_to_num(7, 8, 9), function(x).nan_to_num(7, 8, 9))
    weight = torch.ones_like(function(x))
    weight[0, 1, 0, 1] = torch.inf
    found, theirs = (gradients(call, x, weight) for call in (run, function))
    assert torch.equal(found.nan_to_num(7, 8, 9), theirs.nan_to_num(7, 8, 9))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("scale", [2.0, 3.0, 1.7])
def test_inside_of_transforms(mode: str, scale: float) -> None:
    function = resized({"mode": mode, "scale_factor": scale})

    def transformed(x: torch.Tensor) -> tuple[Any, ...]:
        gradient = torch.func.grad(lambda y: function(y).pow(2).sum())
        each = torch.func.vmap(lambda y: gradient(y.unsqueeze(0)))
        return gradient(x), each(x), torch.func.jvp(function, (x,), (x * 2,))[1]

    check(transformed, (image(2, 3, 6, 7),))


@pytest.mark.parametrize("name", RESIZES)
def test_sizes_that_are_not_known(name: str) -> None:
    function = resized(RESIZES[name])
    run = compiled(function, dynamic=True)
    for shape in (2, 3, 14, 19), (3, 5, 8, 30):
        check_gradient(function, run, image(*shape))
    with recorded() as graphs:
        check_gradient(function, run, image(4, 5, 22, 18))
    assert not graphs  # compiled for all sizes


@pytest.mark.parametrize("lines", [1, 2, 3])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_few_elements(mode: str, lines: int) -> None:
    """Fewer than are weighed."""
    corners = None if mode == "nearest" else True
    for how in (
        {"scale_factor": (2.0, 3.0)},
        {"scale_factor": (1 / lines, 2.6)},
        {"size": (5, 1), "align_corners": corners},
    ):
        torch._dynamo.reset()
        function = resized({"mode": mode, **how})
        x = image(2, 3, lines, lines)
        check(function, (x,))
        check_gradient(function, compiled(function), x)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_no_image(mode: str, dtype: torch.dtype) -> None:
    check(resized({"mode": mode, "scale_factor": 2.0}), (torch.zeros(0, 3, 4, 5, dtype=dtype),))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_lines(mode: str) -> None:
    function, x = resized({"mode": mode, "scale_factor": 2.5}), torch.randn(3, 4, 37)
    check(function, (x,))
    check_gradient(function, compiled(function), x)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_volumes(mode: str) -> None:
    function, x = resized({"mode": mode, "scale_factor": (2.0, 1.5, 3.0)}), torch.randn(1, 3, 4, 6, 5)
    check(function, (x,))
    check_gradient(function, compiled(function), x)


def test_scales_that_sizes_do_not_have() -> None:
    """Of calls of the operator itself: results may lie behind the last element."""
    for scales in (0.3, 0.3), (7.0, 7.0), (0.5, None):
        torch._dynamo.reset()
        check(
            lambda x, scales=scales: torch.ops.aten.upsample_bilinear2d(x, [21, 25], False, *scales),
            (image(1, 2, 10, 12),),
        )
        check(
            lambda x, scales=scales: torch.ops.aten.upsample_nearest2d(x, [21, 25], *scales),
            (image(1, 2, 10, 12),),
        )


def test_gradients_of_what_is_both_resized_and_used() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(x.relu(), scale_factor=2.0, mode="bilinear")
        return F.avg_pool2d(y, 2) * x + F.interpolate(y, size=x.shape[2:], mode="bicubic").tanh()

    check_gradient(function, compiled(function), image(2, 4, 12, 17))
