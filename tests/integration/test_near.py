"""Elements that lie a few apart: vectors are made of neighbouring registers, and nothing beyond is touched."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from tests.support import compiled, recorded

NO_ACCESS = 0  # PROT_NONE
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8]


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 97).to(dtype).view(shape)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_every_so_many(dtype: torch.dtype, step: int) -> None:
    """Of lines that end at the last element read, with all and with some lanes of a vector in use."""

    def spread(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.shape[0], x.shape[1] * step, dtype=x.dtype)
        y[:, step - 1 :: step] = x + x
        return y

    torch._dynamo.reset()
    take, put = compiled(lambda x: x[:, ::step] + x[:, step - 1 :: step]), compiled(spread)
    for lines, length in ((3, 640), (300, 37), (64, 1), (2, 1000)):
        x = numbers(lines, length * step, dtype=dtype)
        assert torch.equal(take(x), x[:, ::step] + x[:, step - 1 :: step])
        assert torch.equal(put(x[:, :length]), spread(x[:, :length]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("many", [2, 3, 4])
def test_what_lies_between_lanes_is_written_with_them(dtype: torch.dtype, many: int) -> None:
    """By whole registers, each of which holds all parts; the last vector of a line has some lanes."""

    def woven(x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(-1) + torch.arange(many).to(x.dtype)).flatten(-2)

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1).expand(*x.shape, many).flatten(-2)

    for function in (woven, repeated):
        torch._dynamo.reset()
        with recorded() as graphs:
            run = compiled(function, dynamic=False)
            for lines, length in ((3, 640), (40, 37), (64, 3)):
                x = numbers(lines, length, dtype=dtype)
                assert torch.equal(run(x), function(x))
        (program,) = graphs[0].programs
        assert any(f"Interleaved<{many}," in kernel.source for kernel in program.kernels.values())


def test_what_is_written_may_be_what_is_read() -> None:
    """Pairs change places in memory that holds both: nothing is written before it is read."""

    def swap(x: torch.Tensor) -> None:
        pairs = x.view(*x.shape[:-1], -1, 2)
        pairs.copy_(pairs.flip(-1) * 2)

    run = compiled(swap)
    x = torch.randn(33, 74)
    expected = x.clone()
    swap(expected)
    run(x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("name", ["shuffle", "unshuffle", "pairs", "planes", "chosen", "reduced"])
def test_what_is_made_of_such(name: str) -> None:
    def pairs(x: torch.Tensor) -> torch.Tensor:
        one, other = x[..., ::2], x[..., 1::2]
        return torch.stack([one * 2 - other, one + other], -1).flatten(-2)

    function = {
        "shuffle": lambda x: torch.nn.functional.pixel_shuffle(x.sin(), 2),
        "unshuffle": lambda x: torch.nn.functional.pixel_unshuffle(x.sin(), 2),
        "pairs": pairs,
        "planes": lambda x: (x[:, :3] * 2).contiguous(memory_format=torch.channels_last),
        "chosen": lambda x: torch.where(x[..., ::2] > 0, x[..., 1::2], x[..., ::2].exp()),
        "reduced": lambda x: x[..., ::2].sum(-1) + x[..., 1::2].amax(-1),
    }[name]
    for size in ((2, 8, 24, 40), (1, 4, 6, 70), (3, 16, 2, 2)):
        x = torch.randn(size)
        result, expected = compiled(function)(x), function(x)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16], ids=str)
def test_positions_near_and_far(dtype: torch.dtype, dynamic: bool) -> None:
    """Those of a vector lie in few registers, or do not; some at the end of the tensor."""
    gather = compiled(lambda x, i: torch.gather(x, 1, i) + 1, dynamic=dynamic)
    x = numbers(5, 333, dtype=dtype)
    rising = torch.arange(333)
    others = (rising * 5).clamp(max=332), rising * 7 % 333, rising % 64 + 269
    for index in (rising, rising.flip(0), rising // 3, *others):
        positions = index.expand(5, -1)
        assert torch.equal(gather(x, positions), torch.gather(x, 1, positions) + 1)
    wrong = rising.clone()
    for place, value in ((332, 333), (17, -1), (0, 1 << 40)):
        wrong[place] = value
        with pytest.raises((IndexError, RuntimeError)):
            gather(x, wrong.expand(5, -1))
        wrong[place] = 0
    assert torch.equal(gather(x, wrong.expand(5, -1)), torch.gather(x, 1, wrong.expand(5, -1)) + 1)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("size", [(128, 200), (40, 31), (7, 333)], ids=str)
def test_images_are_resized(mode: str, size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 60, 75)
    function = compiled(lambda x: torch.nn.functional.interpolate(x, size=size, mode=mode))
    expected = torch.nn.functional.interpolate(x, size=size, mode=mode)
    torch.testing.assert_close(function(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [64, 21])
def test_nothing_behind_the_last_element_is_read_or_written(length: int) -> None:
    """The page behind it may not be touched: that would end the process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(start + page, page, NO_ACCESS) == 0
    for step in (2, 3, 4):
        numel = (length - 1) * step + 1
        x = torch.frombuffer(memory, dtype=torch.float32, count=numel, offset=page - 4 * numel)
        x.copy_(torch.arange(numel))
        torch._dynamo.reset()

        def doubled(x: torch.Tensor, step: int = step) -> None:
            x[::step] *= 2

        expected = x.clone()
        doubled(expected)
        compiled(doubled)(x)
        assert torch.equal(x, expected)
        assert torch.equal(compiled(lambda x, step=step: x[::step] + 1)(x), x[::step] + 1)
        last = numel - 1 - torch.arange(min(numel, 48)).flip(0)
        assert torch.equal(compiled(lambda x, i: x[i] * 2)(x, last), x[last] * 2)
    assert libc.mprotect(start + page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
