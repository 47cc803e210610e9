"""Elements that lie a few apart: vectors are made of neighbouring registers, and nothing beyond is touched."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from tests.support import compiled

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8]


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


@pytest.mark.parametrize("length", [64, 21])
def test_nothing_behind_the_last_element_is_read_or_written(length: int) -> None:
    """The page behind it may not be touched: that would end the process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(start + page, page, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0) == 0
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
    assert libc.mprotect(start + page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
