"""What happens when PyTorch looks the backend up."""

from __future__ import annotations

import gc
import subprocess
import sys

import torch

from pellucid import backend

SCRIPT = """
import pellucid.native.build as build
build.warm_up = lambda: print("started")
import pellucid.backend
"""


def test_the_store_is_filled_while_dynamo_captures() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "started\n"


def test_the_garbage_collector_rests_during_compilation_and_is_on_again_afterwards(monkeypatch) -> None:
    seen: list[bool] = []
    compile_graph = backend.compile_graph

    def watched(*args):
        seen.append(gc.isenabled())
        return compile_graph(*args)

    monkeypatch.setattr(backend, "compile_graph", watched)
    assert gc.isenabled()
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="pellucid")(torch.ones(3))
    assert seen == [False]
    assert gc.isenabled()
