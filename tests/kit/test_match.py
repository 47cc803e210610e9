"""`match`: each kernel with what it implements."""

from __future__ import annotations

import pytest
import torch

from pellucid.capture.torch_compat import module_of
from pellucid.kit.debug.match import Matches, match_graphs
from pellucid.kit.programs.case import Case
from pellucid.kit.runs.run import open_run, save_graph
from pellucid.kit.subjects.registry import subject_of
from pellucid.trace.folder import RunWriter
from tests.kit.planted import negated
from tests.small_models import build_small


class Twice(torch.nn.Module):
    """Two blocks of one class: their lines are the same."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.LayerNorm(8)) for _ in range(2)))

    def forward(self, x):
        return self.blocks(x).relu()


def matched(backend: str, case: Case, backward: bool = False) -> Matches:
    subject = subject_of(backend)
    return match_graphs(subject.graphs(case, backward=backward), subject)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
def test_the_tutorials_kernel(backend):
    (kernel,) = matched(backend, Case("foo", *negated())).kernels
    assert [op for op in kernel.ir_ops if op != "load"] == ["neg", "maximum"]
    assert kernel.fx_nodes[:2] == ("neg = aten.neg.default", "maximum = aten.maximum.default")
    assert all("planted.py:" in line for line in kernel.user_lines)
    (line,) = [line for line in kernel.annotated.splitlines() if "neg(" in line.partition("//")[0]]
    assert "// neg" in line and 0 < kernel.glue < kernel.lines


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["pellucid", pytest.param("inductor", marks=pytest.mark.slow)])
def test_every_kernel_of_a_training_step(backend):
    module, inputs = build_small("bert")
    found = matched(backend, Case("bert", module, (), inputs), backward=True)
    assert found.good and len(found.kernels) > 10
    assert {kernel.graph.partition("_")[0] for kernel in found.kernels} == {"forward", "backward"}


@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
def test_a_user_line_names_the_module_that_ran_it_in_both_directions(backend):
    case = Case("twice", Twice(), (torch.ones(4, 8, requires_grad=True),))
    for kernel in (found := matched(backend, case, backward=True)).kernels:
        assert all(" (blocks." in line or "test_match.py:" in line for line in kernel.user_lines), kernel.user_lines
    for direction in ("forward", "backward"):
        lines = {line for kernel in found.kernels if direction in kernel.graph for line in kernel.user_lines}
        paths = {line.partition(" (")[2].rstrip(")") for line in lines}
        assert paths == {"", "blocks.0.0", "blocks.1.0"}


@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
def test_where_all_lines_are_pytorchs_the_module_is_named_alone(backend):
    layers = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Softmax(0))
    for kernel in matched(backend, Case("layers", layers, (torch.ones(4, 8, requires_grad=True),), {}), True).kernels:
        assert kernel.user_lines and set(kernel.user_lines) <= {
            "module 0 (LayerNorm)",
            "module 1.0 (ReLU)",
            "module 2 (Softmax)",
        }


@pytest.mark.parametrize("module", [Twice(), torch.nn.Sequential(torch.nn.LayerNorm(8))], ids=["line", "no line"])
def test_the_module_of_a_user_line_is_kept_in_a_run(module, tmp_path):
    subject = subject_of("pellucid")
    (graph,) = subject.graphs(Case("module", module, (torch.ones(4, 8),)))
    save_graph(RunWriter.create(tmp_path / "run", backend="pellucid", options={}), graph)
    (again,) = open_run(tmp_path / "run").graphs(None)
    assert match_graphs([again], subject).kernels[0].user_lines == match_graphs([graph], subject).kernels[0].user_lines


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']", ""),
        ("L['self'].blocks.1.norm", "blocks.1.norm"),
        ("L['self'].blocks[1].norm", "blocks.1.norm"),
        ("L['self'].layers['a b']", "layers.a b"),
        ("L['net']._modules['head']", "net.head"),
        ("L['fn'].1", "1"),
        ("G['model'].head", "model.head"),
        ("blocks.1", "blocks.1"),
    ],
)
def test_paths_of_modules_read_as_in_state_dicts(path, name):
    node = torch.fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"1": ("L['self']", None), "2": (path, None)}
    assert module_of(node)[0] == name
