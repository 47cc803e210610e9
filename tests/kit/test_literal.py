"""Values as program text come back as they were: bits, dtypes, strides, offsets, and who shares memory with whom."""

from __future__ import annotations

import runpy

import pytest
import torch

from pellucid.kit.runs.literal import LITERAL, NotWritable, write_values


def read_back(values, folder):
    written = write_values(values, folder)
    program = folder / "program.py"
    program.write_text("from pathlib import Path\nimport torch\n" + written.function())
    return written, runpy.run_path(str(program))["make_inputs"]


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert actual.storage_offset() == expected.storage_offset() and actual.requires_grad == expected.requires_grad
        assert actual.is_conj() == expected.is_conj()
        bits = [each.detach().resolve_conj().contiguous().flatten().view(torch.uint8) for each in (actual, expected)]
        assert torch.equal(*bits)
    elif expected == expected:
        assert actual == expected
    else:
        assert actual != actual


def values():
    torch.manual_seed(0)
    base = torch.randn(10, 12)
    quiet = torch.tensor([0x7FC00001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    yield "numbers", [1, -2.5, True, None, "a'b", float("inf"), float("nan"), 1j, torch.float32, torch.device("cpu")]
    yield "trees", [{"x": [torch.ones(2), (1,)], 3: ()}, torch.Size([2, 3]), (torch.zeros(1),)]
    yield "few numbers", [torch.randn(3, 4), torch.arange(5), torch.tensor(2.5), torch.tensor([True, False])]
    yield "low precision", [torch.randn(5).bfloat16(), torch.randn(5).half(), torch.randn(300).bfloat16()]
    yield "not numbers", [torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]), quiet]
    yield "complex", [torch.randn(3, dtype=torch.complex64), torch.randn(200, dtype=torch.complex64).conj()]
    yield "large integers", [torch.tensor([2**62 + 1, -(2**63)]), torch.tensor([2**63 + 5], dtype=torch.uint64)]
    yield "of one number", [torch.full((300, 2), -1.5), torch.zeros(1000, dtype=torch.int64), torch.full((99,), -0.0)]
    yield "many numbers", [torch.randn(37, 45), torch.randint(9, (500,)), torch.randn(100, dtype=torch.float64)]
    yield "empty", [torch.empty(0), torch.empty(2, 0, 3, dtype=torch.int8)]
    yield "strides", [torch.randn(4, 5).t(), torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)]
    yield "parts", [base[2:5, 1:3], torch.randn(3, 1).expand(3, 7), torch.randn(20)[::3]]
    yield "gradients", [torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.randn(20, 20))]


@pytest.mark.parametrize("given", [pytest.param(given, id=name) for name, given in values()])
def test_there_and_back(given, tmp_path):
    written, make = read_back(given, tmp_path)
    assert_same(make(), given)
    assert (written.file is None) == (not written.statements)


def test_shared_memory_is_shared_again_and_new_each_time(tmp_path):
    base = torch.randn(6, 7)
    _, make = read_back([base, {"row": base[2]}, base.t(), torch.ones(6, 7), base.view(torch.int32)], tmp_path)
    first, tree, turned, other, integers = make()
    first.fill_(3.0)
    assert torch.equal(tree["row"], torch.full((7,), 3.0)) and turned[0, 0] == 3.0 and other[0, 0] == 1.0
    assert integers[1, 1] == torch.tensor(3.0).view(torch.int32)
    assert torch.equal(make()[0], base)


def test_one_number_in_all_elements_needs_no_file(tmp_path):
    written = write_values([torch.full((1000, 1000), 2.0), torch.arange(LITERAL)], tmp_path)
    assert written.file is None and not list(tmp_path.iterdir())


def test_nothing_is_unpickled(tmp_path):
    value = torch.randn(50, 50)
    written = write_values([value], tmp_path)
    assert written.file is not None and written.file.read_bytes() == value.numpy().tobytes()
    assert "torch.load" not in written.function() and "torch.from_file" in written.function()


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.eye(3).to_sparse(), torch.empty(2, device="meta")])
def test_what_has_no_text(value, tmp_path):
    with pytest.raises(NotWritable):
        write_values([value], tmp_path)
