"""Kernels keep up to two MiB on the stack, which is more than some threads have."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from pellucid import compile_exported

CONVOLUTION = """
import torch
from torch import nn
module = nn.Sequential(nn.Conv2d(256, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 512, 1)).eval()
x = torch.randn(2, 256, 28, 28).to(memory_format=torch.channels_last)
run = torch.compile(module, backend="pellucid", options={"freeze": FREEZE})
with torch.no_grad():
    torch.testing.assert_close(run(x), module(x), rtol=1e-3, atol=1e-3)
    x[0, 3, 5, 7] = torch.nan
    torch.testing.assert_close(run(x), module(x), rtol=1e-3, atol=1e-3, equal_nan=True)
print("fine")
"""


@pytest.mark.parametrize("freeze", [False, True])
def test_threads_with_small_stacks_run_kernels(freeze: bool) -> None:
    module = nn.Sequential(nn.Conv2d(256, 128, 3, padding=1), nn.ReLU()).eval()
    product = nn.Linear(300, 500)
    image, rows = torch.randn(1, 256, 28, 28).to(memory_format=torch.channels_last), torch.randn(960, 300)
    # Exported: Dynamo's guards sometimes fail where two threads check them at once, and it then runs a call eagerly.
    programs = [torch.export.export(module, (image,)), torch.export.export(product, (rows,))]
    runs = [compile_exported(each, options={"freeze": freeze}) for each in programs]
    results: list[list[torch.Tensor]] = []

    def call() -> None:
        with torch.no_grad():
            for _ in range(3):
                results.append([run(x) for run, x in zip(runs, (image, rows), strict=True)])

    call()
    before = threading.stack_size(256 << 10)
    try:
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join()
    assert len(results) == 9
    for one, other in results:
        assert torch.equal(one, results[0][0])
        assert torch.equal(other, results[0][1])


@pytest.mark.sampled
@pytest.mark.parametrize("freeze", [False, True])
def test_openmps_threads_may_have_small_stacks(freeze: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONVOLUTION.replace("FREEZE", str(freeze))],
        env={**os.environ, "OMP_STACKSIZE": "256K", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "fine\n", done
