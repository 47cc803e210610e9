"""Generated tests pass, and fail when another kernel than the one that they name implements their graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.kit.debug import testgen as tests
from pellucid.kit.runs.target import Request

MIXED = f"{Path(__file__).parent}/planted.py:mixed"


def outcome(folder: Path) -> str:
    """What pytest says at the end."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.splitlines()[-1]


@pytest.mark.sampled
def test_a_size_that_no_input_of_the_kernel_has_is_an_input(tmp_path):
    """Rows of a slice: (s0 + 1) // 2 says what the graph's inputs are, but not what s0 is."""
    (tmp_path / "program.py").write_text(
        "import torch\ndef program():\n    return (lambda x: x[::2].sort(-1)[0] * 2), (torch.randn(11, 70),)\n"
    )
    found = tests.testgen(Request(f"{tmp_path}/program.py:program", "pellucid", dynamic=True), tmp_path)
    assert found.good and len(found.files) == 1, [test.why for test in found.tests]
    assert outcome(tmp_path).startswith("1 passed")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("pellucid", True),
        pytest.param("pellucid", None, marks=pytest.mark.slow),
        pytest.param("inductor", None, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_what_is_generated_passes_and_means_its_kernel(backend, dynamic, tmp_path):
    found = tests.testgen(Request(MIXED, backend, dynamic=dynamic), tmp_path)
    assert found.good and found.files, [test.why for test in found.tests]
    texts = [Path(file).read_text() for file in found.files]
    assert any("SIZES = {" in text for text in texts) == bool(dynamic), "sizes are symbols where they were"
    changed = texts[0].replace('KERNEL = "', 'KERNEL = "another ')
    (tmp_path / f"{Path(found.files[0]).stem}_.py").write_text(changed)
    assert outcome(tmp_path).startswith(f"1 failed, {len(found.files)} passed"), "the one with another kernel"
