"""Every lowering rule against eager, executed by the interpreter: no C++ takes part."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pellucid.ir.nodes import Program
from tests.operator_cases import all_cases
from tests.support import assert_matches, interpreted, widened

CASES = all_cases()


def in_short_runs(name: str) -> bool:
    """Half of the cases, chosen by their names; `make test-models` runs the others."""
    return zlib.crc32(name.encode()) % 2 == 0


@pytest.mark.sampled
@pytest.mark.parametrize(("function", "args"), [
    pytest.param(function, args, id=name, marks=() if in_short_runs(name) else pytest.mark.slow)
    for name, function, args in CASES
])  # fmt: skip
def test_matches_eager(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    programs: list[Program] = []
    compiled_args, eager_args, wide_args = (
        copy.deepcopy(args),
        copy.deepcopy(args),
        widened(copy.deepcopy(args)),
    )
    with torch.no_grad():
        compiled = interpreted(function, programs)(*compiled_args)
        eager = function(*eager_args)
        reference = function(*wide_args)
    assert programs
    assert_matches((compiled, compiled_args), (eager, eager_args), (reference, wide_args))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(1, 4), (3, 1)])
def test_a_scatter_into_an_expanded_tensor(shape: tuple[int, int], dynamic: bool) -> None:
    def scatter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x, y, (2, 2), (1, 2))

    args = torch.randn(shape).expand(3, 4), torch.randn(2, 2)
    compiled, eager = torch.compile(scatter, backend="pellucid", dynamic=dynamic)(*args), scatter(*args)
    assert torch.equal(compiled, eager) and compiled.stride() == eager.stride()


def test_what_cannot_be_laid_out_says_why() -> None:
    """An operator whose fake result overlaps itself: what it returns cannot lie so."""

    @torch.library.custom_op("pellucid_test::dense", mutates_args=())
    def dense(x: torch.Tensor) -> torch.Tensor:
        return x.expand(3, 4).clone()

    dense.register_fake(lambda x: x.expand(3, 4))
    with pytest.raises(RuntimeError, match=r"cannot lie as promised: with strides .* overlap"):
        torch.compile(lambda x: dense(x) + 1, backend="pellucid")(torch.randn(1, 4))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.nn.functional.logsigmoid(x),
        lambda x: torch.nn.functional.pad(x, (1, 1, 0, 1, 1, 1), mode="reflect"),
        lambda x: torch.nn.functional.pad(x, (1, 1, 0, 1, 1, 1), mode="replicate"),
    ],
    ids=["log_sigmoid", "reflect", "replicate"],
)
def test_results_lie_as_eagers_do_where_fake_ones_do_not(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    volume = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    compiled: Any = torch.compile(call, backend="pellucid", dynamic=False)
    for x in (volume, image, volume.contiguous(), image.transpose(1, 2)):
        ours, eagers = compiled(x), call(x)
        assert ours.stride() == eagers.stride()
        torch.testing.assert_close(ours, eagers)


def test_whole_programs_of_such_operators_lie_as_eagers_do() -> None:
    third, row = torch.tensor(1 / 3), torch.randn(6)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat, dense = x.flatten(2), x.contiguous()
        places = 4 * torch.arange(x[0, 0].numel()).reshape(x.shape[2:]).expand(x.shape)
        found = torch.isin(x, row), torch.isin(x, 2.0, invert=True)
        scattered = x.select_scatter(x[:, 0], 1, -2), x.select_scatter(x[..., 0].double(), 3, 1)
        quotients = (
            x // third,
            dense // x,
            x // dense,
            x // x[:1, :, :1, :1],
            torch.div(x, third, rounding_mode="floor"),
        )
        narrow = x.bfloat16() // third  # which is not rounded to bfloat16 first
        signed = x.copysign(third), x.copysign(dense), dense.int().copysign(x.int()), third.copysign(x)
        normalised = torch.nn.functional.batch_norm(flat[0].t(), None, None, training=True)
        unpooled = torch.nn.functional.max_unpool2d(x, places.to(memory_format=torch.channels_last), 2)
        return *found, *scattered, *quotients, narrow, *signed, normalised, torch.channel_shuffle(x, 2), unpooled

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="pellucid", dynamic=False)
    x = torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last)
    for each in (x, x.contiguous(), x[:, :, ::2], x.permute(2, 1, 3, 0)):
        for number, (ours, eagers) in enumerate(zip(compiled(each), program(each), strict=True)):
            assert (ours.stride(), ours.dtype) == (eagers.stride(), eagers.dtype), number
            torch.testing.assert_close(ours, eagers, msg=lambda text, number=number: f"{number}: {text}")


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_of_select_scatter_may_be_strided(dynamic: bool) -> None:
    def scatter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.select_scatter(y, 1, -1) if x.shape[0] > 2 else x.select_scatter(y, 1, 0)

    compiled = torch.compile(scatter, backend="pellucid", dynamic=dynamic)
    for x in (torch.randn(4, 10)[:, ::2], torch.randn(5, 4).t(), torch.randn(1, 3).expand(2, 3)):
        actual, eager = compiled(x, torch.ones(x.shape[0])), scatter(x, torch.ones(x.shape[0]))
        assert torch.equal(actual, eager) and actual.stride() == eager.stride()


def test_results_of_roll_lie_as_eagers_do() -> None:
    def rolled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = x.roll(1, -1), x.roll((1, 2), (1, 2)), x.roll(3), x.int().roll(1, 1), torch.flip(x.roll(1, 0), (1,))
        return *turned, x.roll(0, 1), x.roll(-6, 2), x.roll((0, 0), (1, 2)), x.roll((1, 1), (3, 3))

    torch._dynamo.reset()
    compiled = torch.compile(rolled, backend="pellucid", dynamic=False)
    x = torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last)
    for each in (x, x[:, ::2], x.contiguous(), x.permute(0, 3, 1, 2), x[:, :1].expand(2, 4, 6, 5)):
        for ours, eagers in zip(compiled(each), rolled(each), strict=True):
            assert torch.equal(ours, eagers) and ours.stride() == eagers.stride()


def test_a_quantised_tensor_is_refused_at_its_call() -> None:
    """Fake tensors say that it is f32: nothing that follows from one could be compiled."""

    def quantised(x: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize() + 1

    with pytest.raises(Exception, match=r"with the dtype torch\.quint8[\s\S]*torch\.compiler\.disable"):
        torch.compile(quantised, backend="pellucid")(torch.ones(2, 3))
