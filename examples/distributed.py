"""Distributed training of a compiled model, beside the same training in eager mode.

    torchrun --nproc-per-node 2 examples/distributed.py --mode ddp      # or fsdp2, or tp

Every rank trains a small transformer for a few steps: eager, compiled, and in float64, which tells how exact the first
two are. Rank 0 prints the losses, and what each compiled graph calls. The exit status is 1 if the compiled model's
losses or gradients are further from float64 than rounding explains.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pellucid.backend import last_compilations

WIDTH, HEADS, LAYERS, TOKENS, BATCH, STEPS = 64, 4, 2, 16, 4, 4

# How far from float64, relative to the largest number: twice as far as eager, and this much for luck.
FLOOR = 1e-5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # no bias: a key's does not change the result, so that its gradient would be nothing but rounding
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # -1: under tensor parallelism a rank has a part of the heads
        q, k, v = (
            projection(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(dtype: torch.dtype) -> Transformer:
    """The same weights on every rank and at every call."""
    torch.manual_seed(0)
    return Transformer().to(dtype)


def data_parallel(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """DDP: the whole model on every rank, gradients averaged while backward runs."""
    return DistributedDataParallel(model)


def fully_sharded(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """FSDP2: each rank holds a part of every parameter; a block's are gathered before it runs."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism: each rank computes a part of the heads and of the hidden features, then they are added up."""
    columns, rows = ("attention.query", "attention.key", "attention.value", "up"), ("attention.out", "down")
    plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


MODES: dict[str, Callable[[Transformer, DeviceMesh], nn.Module]] = {
    "ddp": data_parallel,
    "fsdp2": fully_sharded,
    "tp": tensor_parallel,
}


def train(mode: str, mesh: DeviceMesh, dtype: torch.dtype, backend: str | None) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of all steps, averaged over ranks, and the whole gradients of the last step, on every rank."""
    model = MODES[mode](build(dtype), mesh)
    forward = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Ranks share the data under tensor parallelism; otherwise each has its own.
    generator = torch.Generator().manual_seed(0 if mode == "tp" else dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        loss = (forward(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    curve = torch.stack(losses).double()
    dist.all_reduce(curve)
    curve /= dist.get_world_size()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [curve], [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--backend", default="pellucid")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it as: torchrun --nproc-per-node 2 examples/distributed.py --mode ...")
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        exact = train(given.mode, mesh, torch.float64, None)
        eager = train(given.mode, mesh, torch.float32, None)
        found = train(given.mode, mesh, torch.float32, given.backend)
        status = 0
        for what, ours, theirs, reference in zip(("losses", "gradients"), found, eager, exact, strict=True):
            error, allowed = distance(ours, reference), 2 * distance(theirs, reference) + FLOOR
            status |= not error <= allowed
            if dist.get_rank() == 0:
                print(f"{what}: error {error:.1e} against float64, allowed {allowed:.1e}")
        if dist.get_rank() == 0:
            print("losses:", *(f"{loss:.6f}" for loss in found[0][0].tolist()))
            for graph in last_compilations():
                collectives = sum("c10d" in call.op for call in graph.calls)
                print(f"{graph.name}: {graph.kernels} kernels, {graph.fallbacks} calls, {collectives} of collectives")
        return int(status)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Not `sys.exit`: PyTorch aborts when a thread of gloo frees the tensors of its last work while Python ends.
    os._exit(status)
