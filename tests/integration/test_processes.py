"""Commands, engines and measurements that take processes of their own, or seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pellucid.bench import Case, Settings, compare
from pellucid.kit.bench.startup import Request, cold_and_warm
from pellucid.machine import AVX2
from pellucid.native.measure import measure


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_a_real_engine_where_it_is_installed(name):
    pytest.importorskip(name, reason="an extra: pip install 'pellucid[peers]'")

    class Own(torch.nn.Linear):
        def forward(self, x, scale, other):
            return {"a": super().forward(x).relu() * scale, "b": (other + 1, None)}

    case = Case("own", Own(4, 8), (torch.randn(2, 4), 2.0), {"other": torch.arange(3)})
    result = compare(case, Settings(subjects=(name, f"{name}:NO_SUCH=1"), budget=0.05))
    _, good, wrong = result.subjects
    assert good.accurate and good.seconds is not None, good
    assert wrong.failure is not None and "NO_SUCH" in wrong.failure


@pytest.mark.sampled
def test_fresh_processes_start_on_an_empty_cache_and_then_on_what_was_left():
    cold, warm = cold_and_warm(Request("pointwise_small", "aot_eager", 1, 128, "f32", threads=1))
    assert warm is not None
    for start in (cold, warm):
        assert start.failure is None and start.seconds is not None and start.seconds > 0
        assert start.built_bytes is not None and start.peak_bytes is not None
        assert 2**20 < start.built_bytes <= start.peak_bytes


@pytest.mark.sampled
@pytest.mark.parametrize(
    "call", [["bench", "--list"], ["diff", "no_run", "no_run"], ["check", "no.py:x", "--backend", "eager"]]
)
def test_every_command_tells_once_of_variables_that_mean_nothing(call):
    environment = {**os.environ, "PELLUCID_VECTORISE": "0"}
    command = [sys.executable, "-m", "pellucid", *call]
    said = subprocess.run(command, capture_output=True, text=True, env=environment).stderr
    assert said.count("PELLUCID_VECTORISE") == 1
    assert "means nothing to Pellucid: did you mean PELLUCID_VECTORIZE?" in said


@pytest.mark.sampled
def test_measuring() -> None:
    found = measure()
    machine, figures = found.machine, found.machine.figures
    assert figures.keys() == AVX2.figures.keys() and 0 <= found.waited <= 1
    assert all(value > 0 for value in figures.values()) and figures.keys() == machine.spread.keys()
    for name, value in figures.items():  # of the right order, as far as one thread can tell beside other processes
        if name.endswith(".one") and not name.startswith(("product.bf16", "product.f16")):
            assert AVX2.figures[name] / 100 < value < 100 * AVX2.figures[name], name
    assert machine.flops.f32.one >= machine.product.f32.one
