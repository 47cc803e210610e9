"""Programs that change part of their inputs: eager's results and inputs, and no copy of what is not changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pellucid.debug import Program
from pellucid.ir.nodes import Kernel
from tests.integration.traced import decisions, names_of_kernels
from tests.support import assert_matches, recorded, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = nn.functional
BATCH, HEADS, LENGTH, SIZE = 2, 2, 40, 8
Change = Callable[[Tensor, Tensor, Tensor, int], Any]


def by_vector(cache: Tensor, new: Tensor, at: Tensor, start: int) -> None:
    cache[:, :, at] = new[:, :, : at.shape[0]]


def by_copy(cache: Tensor, new: Tensor, at: Tensor, start: int) -> None:
    cache.index_copy_(2, at, new[:, :, : at.shape[0]])


def by_sum(cache: Tensor, new: Tensor, at: Tensor, start: int) -> None:
    cache.index_add_(2, at, new[:, :, : at.shape[0]])


def by_number(cache: Tensor, new: Tensor, at: Tensor, start: int) -> None:
    cache[:, :, start] = new[:, :, 0]
    cache[:, :, -1] = new[:, :, 1]


def by_slice(cache: Tensor, new: Tensor, at: Tensor, start: int) -> None:
    cache[:BATCH, :, start : start + 3] = new


def by_steps(cache: Tensor, new: Tensor, at: Tensor, start: int) -> None:
    cache[:, :, start : start + 6 : 2] += new


def by_line(cache: Tensor, new: Tensor, at: Tensor, start: int) -> None:
    cache[1][:, at] = new[0, :, : at.shape[0]]
    cache[0, 1][start] = new[0, 0, 0]


def by_diagonal(cache: Tensor, new: Tensor, at: Tensor, start: int) -> None:
    cache.diagonal(0, 2, 3).copy_(new[:, :, 0])


CHANGES = (by_vector, by_copy, by_sum, by_number, by_slice, by_steps, by_line, by_diagonal)


def arguments(dtype: torch.dtype, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(count)
    cache = torch.randn(BATCH, HEADS, LENGTH, SIZE, generator=generator).to(dtype)
    new = torch.randn(BATCH, HEADS, 3, SIZE, generator=generator).to(dtype)
    return [cache, new, torch.randperm(LENGTH, generator=generator)[:count], 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_only_what_changes_is_written(change: Change, count: int, dtype: torch.dtype) -> None:
    def step(cache: Tensor, new: Tensor, at: Tensor, start: int) -> tuple[Tensor, Tensor]:
        before = cache.sum(2)
        change(cache, new, at, start)
        return before, torch.softmax(cache, 2)

    torch._dynamo.reset()
    run = torch.compile(step, backend="pellucid", options={"verify": True})
    mine, eager = arguments(dtype, count), arguments(dtype, count)
    with recorded() as records:
        for start in (5, 6, 30):
            mine[3] = eager[3] = start
            wide = widened(eager)
            assert_matches([*run(*mine), mine[0]], [*step(*eager), eager[0]], [*step(*wide), wide[0]])
    if change is by_sum and dtype is torch.bfloat16:
        return  # all of the cache is added to in f32
    for record in records:
        stores = [kernel for kernel in record.scheduled.nodes if isinstance(kernel, Kernel) and writes_input(kernel)]
        assert stores and all(points(kernel) * 5 < BATCH * HEADS * LENGTH * SIZE for kernel in stores)


def writes_input(kernel: Kernel) -> bool:
    return any(store.buffer.startswith("arg") for _, store in kernel.stores())


def points(kernel: Kernel) -> int:
    count = 1
    for axis in kernel.space:
        count *= axis.extent.value or 1
    return count


def test_layers_of_one_cache(tmp_path: Path) -> None:
    def decode(caches: Tensor, query: Tensor, new: Tensor, at: Tensor) -> Tensor:
        for cache in caches:
            cache[:, :, at] = new
            query = F.scaled_dot_product_attention(query, cache, cache)
        return query

    torch._dynamo.reset()
    run = torch.compile(decode, backend="pellucid", options={"trace": str(tmp_path), "verify": True})
    caches, new = torch.randn(3, BATCH, HEADS, LENGTH, SIZE), torch.randn(BATCH, HEADS, 1, SIZE)
    mine, eager, wide = caches.clone(), caches.clone(), caches.double()
    at, query = torch.tensor([7]), torch.randn(BATCH, HEADS, 1, SIZE)
    results = [
        call(each, query.to(each.dtype), new.to(each.dtype), at)
        for call, each in ((run, mine), (decode, eager), (decode, wide))
    ]
    assert_matches(*([each] for each in results))
    assert torch.equal(mine, eager)
    assert sum(name.startswith("index_put") for name in names_of_kernels(tmp_path)) == 3
    assert len(names_of_kernels(tmp_path)) == 6


def lines_of_one(x: Tensor, n: Tensor) -> Tensor:
    x[0, 2:4] = n[:2]
    return x * 2


def a_column(x: Tensor, n: Tensor) -> Tensor:
    x[:, 1] = n[: x.shape[0]]
    return x * 2


def all_of_it(x: Tensor, n: Tensor) -> Tensor:
    x[0:1].index_fill_(1, torch.tensor([0, 2]), 0.7)
    x[x < -0.3] = -0.2
    return x.exp()


@pytest.mark.parametrize("change", [lines_of_one, a_column, all_of_it])
@pytest.mark.parametrize("dynamic", [None, True])
def test_parts_that_are_all_there_is(change: Any, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    run = torch.compile(change, backend="pellucid", dynamic=dynamic, options={"verify": True})
    for shape in ((1, 6), (2, 7), (1, 8), (5, 6)):
        mine, new = torch.randn(shape), torch.randn(6)
        eager = mine.clone()
        assert torch.equal(run(mine, new), change(eager, new)) or change is all_of_it
        assert torch.equal(mine, eager)


def test_what_is_read_later_keeps_its_values(tmp_path: Path) -> None:
    def step(cache: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        old = cache.clone()
        cache[:, 0] = new
        return old, old[:, :4] * cache[:, 1:5]

    torch._dynamo.reset()
    run = torch.compile(step, backend="pellucid", options={"trace": str(tmp_path), "verify": True})
    mine = torch.randn(4, 30, 8)
    eager = mine.clone()
    for _ in range(2):
        new = torch.randn(4, 8)
        for one, other in zip(run(mine, new), step(eager, new), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(mine, eager)


def test_results_do_not_share_memory_with_a_changed_input() -> None:
    def step(cache: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        cache[:, 0] = new
        return cache.clone(), cache

    run = torch.compile(step, backend="pellucid", options={"verify": True})
    cache = torch.randn(4, 30, 8)
    copied, same = run(cache, torch.randn(4, 8))
    assert torch.equal(copied, cache) and copied.data_ptr() != cache.data_ptr()
    assert same.data_ptr() == cache.data_ptr()


def test_functional_updates_leave_their_input_alone(tmp_path: Path) -> None:
    def step(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
        return cache.index_copy(1, at, new) * 2

    run = torch.compile(step, backend="pellucid", options={"trace": str(tmp_path), "verify": True})
    cache, new = torch.randn(4, 30, 8), torch.randn(4, 2, 8)
    before = cache.clone()
    assert torch.equal(run(cache, new, torch.tensor([3, 9])), step(cache, new, torch.tensor([3, 9])))
    assert torch.equal(cache, before)
    (why,) = [row["why"] for row in decisions(tmp_path) if row["rule"] == "schedule.in_place"]
    assert "belongs to the caller and must not change" in why


def test_a_wrong_position_is_an_error() -> None:
    def step(cache: Tensor, new: Tensor, at: Tensor) -> None:
        cache[:, at] = new

    run = torch.compile(step, backend="pellucid")
    cache = torch.zeros(4, 30, 8)
    run(cache, torch.ones(4, 1, 8), torch.tensor([29]))
    with pytest.raises(IndexError, match="30"):
        run(cache, torch.ones(4, 1, 8), torch.tensor([30]))
    assert cache.sum() == 32


def looked_up(cache: Tensor, table: Tensor, at: Tensor) -> None:
    cache.copy_(table[at])


def looked_up_in_columns(cache: Tensor, table: Tensor, at: Tensor) -> None:
    cache.t().copy_(table[at].t().exp())


def looked_up_in_part(cache: Tensor, table: Tensor, at: Tensor) -> None:
    cache[:, 1:-1] += table[at][:, 2:]


def looked_up_between(cache: Tensor, table: Tensor, at: Tensor) -> None:
    cache.copy_(torch.stack([table[at], table[at] * 2], -1).flatten(1)[:, : cache.shape[1]])


@pytest.mark.parametrize("size", [(3, 6), (40, 70)])
@pytest.mark.parametrize("change", [looked_up, looked_up_in_columns, looked_up_in_part, looked_up_between])
def test_what_is_looked_up_at_a_wrong_position_is_not_stored(change: Any, size: tuple[int, int]) -> None:
    run = torch.compile(change, backend="pellucid", options={"verify": True})
    cache, table, at = torch.randn(size), torch.randn(10, size[1]), torch.randint(10, (size[0],))
    mine, eager = cache.clone(), cache.clone()
    run(mine, table, at)
    change(eager, table, at)
    assert_matches([mine], [eager], [eager.double()])
    mine, at[1] = cache.clone(), 10
    with pytest.raises(IndexError, match="10"):
        run(mine, table, at)
    assert torch.equal(mine[1:], cache[1:])


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("groups", [2, 3])
def test_repeated_keys_are_not_in_memory(size: int, groups: int, tmp_path: Path) -> None:
    def attend(query: Tensor, cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(2, at, new)
        keys = cache[:, :, None].expand(-1, -1, groups, -1, -1).reshape(BATCH, -1, LENGTH, size)
        return F.scaled_dot_product_attention(query, keys, cache.repeat_interleave(groups, 1))

    torch._dynamo.reset()
    run = torch.compile(attend, backend="pellucid", options={"trace": str(tmp_path), "verify": True})
    cache, query = torch.randn(BATCH, HEADS, LENGTH, size), torch.randn(BATCH, HEADS * groups, 1, size)
    new, at = torch.randn(BATCH, HEADS, 1, size), torch.tensor([3])
    mine, eager = cache.clone(), cache.clone()
    results = run(query, mine, new, at), attend(query, eager, new, at)
    assert_matches(*([each] for each in results), [attend(query.double(), cache.double(), new.double(), at)])
    assert torch.equal(mine, eager)
    first, second = names_of_kernels(tmp_path)
    assert first.startswith("index_copy") and second.startswith("scaled_dot_product")


def test_changes_are_compared_where_they_happen() -> None:
    def step(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(1, at, new)
        return cache.exp().sum(2)

    report = Program(step, (torch.randn(4, 30, 8), torch.randn(4, 2, 8), torch.tensor([3, 9]))).cosim()
    assert report.verdict.good
    assert "index_copy" in {each.fx_node for each in report.differences}


def test_a_copy_is_not_shared_by_models() -> None:
    """A module that holds a cache of its own, frozen or not: each call adds to it."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6, 8))

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            self.seen[at] += x
            return self.seen * 2

    eager = Counter()
    for freeze in (False, True):
        mine, wanted = copy.deepcopy(eager), copy.deepcopy(eager)
        torch._dynamo.reset()
        run = torch.compile(mine, backend="pellucid", options={"verify": True, "freeze": freeze})
        with torch.no_grad():
            for place in (1, 5, 1):
                x, at = torch.randn(8), torch.tensor([place])
                assert torch.equal(run(x, at), wanted(x, at))
        assert torch.equal(mine.seen, wanted.seen)
