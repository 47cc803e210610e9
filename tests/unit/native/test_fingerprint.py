"""What the fingerprint of tensors notices, and when."""

from __future__ import annotations

import pytest
import torch

from pellucid.native.fingerprint import Fingerprint

PAGE = 1024  # elements of f32


def test_a_change_of_a_whole_tensor_is_noticed_at_once() -> None:
    for size in (1, 3, PAGE, 3 * PAGE + 5, 100 * PAGE):
        tensors = [torch.randn(7), torch.randn(size)]
        seen = Fingerprint.of(tensors)
        assert all(seen.holds(tensors) for _ in range(20))
        tensors[1].data.mul_(2)
        assert not any(seen.holds(tensors) for _ in range(20)), "at each call, whichever pages are looked at"


def test_a_change_of_some_pages_is_noticed_within_eight_calls() -> None:
    tensor = torch.randn(64 * PAGE)
    seen = Fingerprint.of([tensor])
    for page in (0, 5, 63):
        before = tensor[page * PAGE : (page + 1) * PAGE].clone()
        tensor.data[page * PAGE : (page + 1) * PAGE] += 1
        assert sum(not seen.holds([tensor]) for _ in range(8)) == 1
        tensor.data[page * PAGE : (page + 1) * PAGE] = before
        assert all(seen.holds([tensor]) for _ in range(8))


def test_what_pytorch_counts_and_tensors_of_inference_mode_are_noticed_at_once() -> None:
    counted = torch.zeros(64 * PAGE)
    with torch.inference_mode():
        uncounted = torch.zeros(64 * PAGE)
    seen = Fingerprint.of([counted, uncounted])
    assert seen.holds([counted, uncounted])
    with torch.inference_mode():
        uncounted[7 * PAGE : 8 * PAGE] = 1
        assert not any(seen.holds([counted, uncounted]) for _ in range(80))
        uncounted[7 * PAGE : 8 * PAGE] = 0
    assert seen.holds([counted, uncounted])
    counted[1] = 1
    assert not seen.holds([counted, uncounted])
    assert not seen.holds([uncounted, counted])


@pytest.mark.parametrize("size", [1, 17, PAGE - 1, 5 * PAGE + 20, 40 * PAGE + 3])
def test_a_change_of_any_element_is_noticed_after_all_lines(size: int) -> None:
    tensors = [torch.randn(33), torch.randn(size), torch.randn(PAGE)]
    seen = Fingerprint.of(tensors)
    calls = 8 * 64
    for element in {0, size // 3, size - 1, min(size - 1, 3 * PAGE + 517)}:
        before = tensors[1][element].item()
        tensors[1].data[element] = before + 1
        assert not seen.holds_entirely(tensors)
        assert any([not seen.holds(tensors) for _ in range(calls)])
        tensors[1].data[element] = before
        assert seen.holds_entirely(tensors)
    tensors[2].data[77] = 5
    assert any([not seen.holds(tensors) for _ in range(calls)])
