"""Parameters that begin at the first element that a kernel touches."""

from __future__ import annotations

from dataclasses import replace

import torch

import pellucid.backend
from pellucid.codegen import generate
from pellucid.codegen.offsets import from_first_touched
from pellucid.ir.index import sym
from pellucid.ir.nodes import Load
from pellucid.ir.parser import parse_kernel
from pellucid.ir.printer import print_kernel
from pellucid.machine import AVX512
from pellucid.options import Options


def part(first: int) -> str:
    return f"""\
kernel k(x: f32[8192], y: f32[1024]) {{
  axes i0: 1024
  v0: f32 = load x[i0 + {first}]
  v1: f32 = exp v0
  s0: f32 = store y[i0], v1
}}
"""


def test_equal_parts_are_one_kernel() -> None:
    first, later = (generate(parse_kernel(part(at)), Options(), AVX512) for at in (0, 3072))
    assert first.source == later.source
    assert (first.offsets, later.offsets) == ((0, 0), (3072, 0))


def test_all_accesses_move_by_the_least() -> None:
    text = """\
kernel k(x: f32[8192], y: f32[1024]) {
  axes i0: 1024
  v0: f32 = load x[i0 + 512]
  v1: f32 = load x[3*i0 + 700]
  v2: f32 = add v0, v1
  s0: f32 = store y[i0], v2
}
"""
    kernel, offsets = from_first_touched(parse_kernel(text), ())
    assert offsets == (512, 0)
    assert "load x[i0]" in print_kernel(kernel) and "load x[3*i0 + 188]" in print_kernel(kernel)
    assert kernel.params[0].numel.value == 3 * 1023 + 188 + 1


def test_what_is_not_known_stays() -> None:
    kernel = parse_kernel(part(512))
    load = kernel.body[0]
    assert isinstance(load.rhs, Load)
    later = replace(load, rhs=replace(load.rhs, index=load.rhs.index + sym("s0")))
    assert from_first_touched(replace(kernel, body=(later, *kernel.body[1:])), ())[1] == (0, 0)
    assert from_first_touched(kernel, {"x"}) == (kernel, (0, 0))


def test_no_more_than_the_buffer_is_said_to_be_touched() -> None:
    """A mask may keep a load inside of its buffer where the index does not."""
    text = part(512).replace("x: f32[8192]", "x: f32[1000]")
    kernel, _ = from_first_touched(parse_kernel(text), ())
    assert kernel.params[0].numel.value == 1000 - 512


def test_the_steps_of_a_recurrent_network_share_their_kernels() -> None:
    torch._dynamo.reset()

    def network(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[0], w.shape[0])
        for step in range(x.shape[1]):
            h = torch.tanh(x[:, step] @ u + h @ w)
        return h

    x, w, u = torch.randn(4, 7, 24), torch.randn(40, 40) / 8, torch.randn(24, 40)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(network, backend="pellucid")(x, w, u), network(x, w, u))
    made = pellucid.backend.last_compilations()[-1]
    assert made.kernels >= 13 and made.distinct <= 4
