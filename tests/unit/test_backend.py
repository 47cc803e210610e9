"""What happens when PyTorch looks the backend up."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from pellucid import backend

SCRIPT = """
import threading
import torch
import pellucid.backend
print([thread.name for thread in threading.enumerate() if "pellucid" in thread.name])
pellucid.backend.warm_up = lambda: print("started")
torch.compile(lambda x: x + 1, backend="pellucid")
"""


@pytest.mark.sampled
def test_the_store_is_filled_while_dynamo_captures_and_not_by_an_import() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nstarted\n"


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


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["backend.last_starts", "debug.check", "profiling.profile_of_function", "profile"])
def test_what_the_readme_names_needs_no_other_import(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import pellucid; print(callable(pellucid.{name}))"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "True\n", done
