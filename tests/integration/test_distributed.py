"""Distributed training with two ranks of gloo: as good as eager's, and compiled where it should be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pellucid.backend import last_compilations

ROOT = Path(__file__).parents[2]


def torchrun(mode: str) -> tuple[int, str]:
    """Exit status and output of the example with two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, "examples/distributed.py", "--mode", mode],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.terminate()  # then torchrun ends the ranks
        output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mode", "forwards", "backwards"),
    [("ddp", 1, 1), pytest.param("fsdp2", 2, 2, marks=pytest.mark.slow), ("tp", 1, 1)],
)
def test_losses_and_gradients_are_as_exact_as_eagers(mode: str, forwards: int, backwards: int) -> None:
    """The example's exit status says so. FSDP2 breaks the graph at each block; those of tp hold the collectives."""
    status, output = torchrun(mode)
    assert status == 0, output
    assert len(re.findall(r"(?m)^(losses|gradients): error", output)) == 2
    graphs = re.findall(r"(?m)^(forward|backward)_\d+: (\d+) kernels, \d+ calls, (\d+) of collectives$", output)
    kinds = [kind for kind, _, _ in graphs]
    assert (kinds.count("forward"), kinds.count("backward")) == (forwards, backwards), output
    assert all(int(kernels) > 0 for _, kernels, _ in graphs)
    assert all((int(collectives) > 0) == (mode == "tp") for _, _, collectives in graphs)


class Layers(nn.Module):
    """Three layers. Dynamo does not look into `nn.Sequential` below DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_ddp_cuts_the_graph_where_a_bucket_of_gradients_is_full() -> None:
    """Each layer fills a bucket. PyTorch runs a part that it has compiled on fake tensors, to compile the next."""
    torch.manual_seed(0)
    model = Layers()
    x = torch.randn(2, 600)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    before = len(last_compilations())
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compiled = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="pellucid")
        for _ in range(2):
            model.zero_grad()
            compiled(x).square().sum().backward()
            torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))
    finally:
        dist.destroy_process_group()
    assert sorted(each.kind for each in last_compilations()[before:]) == ["backward"] * 3 + ["forward"] * 3
