"""Random programs of pointwise, reduction, view, cat and mutation operators mean the same after scheduling."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pellucid.ir.nodes import Program, View
from pellucid.ir.printer import print_program
from pellucid.schedule.memory import check_memory_plan, plan_memory
from tests.unit.schedule.build import ProgramBuilder, Tensor, check_same, lives, scheduled

_SIZES = (1, 2, 3, 4, 6)
_UNARY = ("neg", "abs", "sign", "maximum")
_BINARY = ("add", "sub", "mul", "minimum")


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Small whole numbers everywhere: sums of products of a few of them are exact in any order."""
    b = ProgramBuilder()
    inputs = [b.input(*draw(_shapes())) for _ in range(draw(st.integers(1, 3)))]
    pool = list(inputs)
    for _ in range(draw(st.integers(2, 10))):
        pool.append(draw(_step(b, pool, inputs)))
    outputs = draw(st.lists(st.sampled_from(pool[len(inputs) :]), min_size=1, max_size=3, unique_by=id))
    return b.finish(*outputs)


def _shapes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(_SIZES), min_size=1, max_size=3)


@st.composite
def _step(draw: st.DrawFn, b: ProgramBuilder, pool: list[Tensor], inputs: list[Tensor]) -> Tensor:
    """One operator on recent values, mostly; its result stays small."""
    x = draw(_viewed(draw(st.sampled_from(pool[-4:] + pool[:1]))))
    match draw(st.sampled_from(("unary", "binary", "binary", "reduce", "copy", "cat", "write", "full"))):
        case "unary":
            name = draw(st.sampled_from(_UNARY))
            return b.op("sign", x) if name == "sign" else b.op(name, x, *([0.5] if name == "maximum" else []))
        case "binary":
            views = [draw(_viewed(draw(st.sampled_from(pool[-3:])))) for _ in range(2)]
            turned = x.permute(*reversed(range(len(x.shape))))
            partners = [y for y in (*pool, *views, turned) if _compatible(x, y)]
            y = draw(st.sampled_from(partners)) if partners else draw(st.sampled_from((1.0, -2.0)))
            return b.op("minimum", b.op(draw(st.sampled_from(_BINARY)), x, y), 3.0)
        case "reduce":
            dims = draw(st.lists(st.integers(0, len(x.shape) - 1), min_size=1, max_size=2, unique=True))
            total = b.reduce(draw(st.sampled_from(("sum", "max"))), x, *dims)
            return b.op("sign", total)
        case "copy":
            return b.copy(x)
        case "cat":
            dim = draw(st.integers(0, len(x.shape) - 1))
            return b.cat([x, draw(st.sampled_from((x, b.op("neg", x))))], dim)
        case "write":
            target = draw(_viewed(draw(st.sampled_from(inputs))))
            if target.shape == x.shape and x.view.buffer != target.view.buffer:
                b.write(target, x)
            return b.op("neg", target)
        case _:
            return b.op("add", x, b.full(2.0, 1))


@st.composite
def _viewed(draw: st.DrawFn, x: Tensor) -> Tensor:
    """A view of `x`."""
    for _ in range(draw(st.integers(0, 2))):
        dim = draw(st.integers(0, len(x.shape) - 1))
        extent = x.shape[dim].value or 1
        match draw(st.sampled_from(("permute", "slice", "split", "merge", "unsqueeze"))):
            case "permute":
                x = x.permute(*draw(st.permutations(range(len(x.shape)))))
            case "slice" if extent > 1:
                start = draw(st.integers(0, extent - 1))
                x = x.slice(dim, start, draw(st.integers(start + 1, extent)))
            case "split" if extent > 1 and len(x.shape) < 4:
                inner = draw(st.sampled_from([k for k in range(1, extent + 1) if extent % k == 0]))
                x = x.split(dim, inner)
            case "merge" if dim + 1 < len(x.shape):
                x = x.merge(dim) or x
            case "unsqueeze" if len(x.shape) < 4:
                x = x.unsqueeze(dim)
            case _:
                pass
    return x


def _compatible(x: Tensor, y: Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(a == b or a.value == 1 or b.value == 1 for a, b in pairs)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_scheduling_keeps_the_meaning(program: Program) -> None:
    after = scheduled(program)
    check_memory_plan(lives(after), plan_memory(lives(after)))
    # The stage is done in one go: its result scheduled again is the same program but for names.
    assert len(scheduled(after).nodes) <= len(after.nodes)


def test_views_of_outputs_are_kept() -> None:
    b = ProgramBuilder()
    x = b.input(4, 6)
    y = b.op("neg", x)
    program = b.finish(y, y.permute(1, 0))
    after = scheduled(program)
    assert [output.shape for output in after.outputs if isinstance(output, View)] == [y.shape, y.shape[::-1]]
    check_same(program, after)
    assert "neg_0" in print_program(after)
