from __future__ import annotations

from pellucid.schedule.dead import remove_dead
from pellucid.schedule.deps import dependencies
from pellucid.schedule.order import late_order, order
from tests.unit.schedule.build import ProgramBuilder


def test_late_order_puts_a_value_before_its_user() -> None:
    assert late_order([(), (), (1,), (0, 2)]) == [1, 2, 0, 3]
    assert late_order([(), (), (0,), (1, 2)]) == [0, 2, 1, 3]


def test_order_keeps_the_graph_where_nothing_is_gained() -> None:
    b = ProgramBuilder()
    x = b.input(8)
    program = b.finish(b.op("exp", b.op("neg", x)))
    assert order(program)[0] is program


def test_order_shortens_lifetimes() -> None:
    b = ProgramBuilder()
    w = b.input(64, 64)
    early = [b.mm(w, w) for _ in range(4)]
    total = w
    for product in early:
        total = b.mm(total, product)
    program = b.finish(total)
    after, (decision,) = order(program)
    assert decision.ok
    facts = dict(decision.facts)
    assert facts["peak_late"] < facts["peak_given"]
    assert {node.name for node in after.nodes} == {node.name for node in program.nodes}


def test_dependencies_of_mutation() -> None:
    b = ProgramBuilder()
    x = b.input(8)
    y = b.op("neg", x)  # 0 reads x
    b.write(x, y)  # 1 writes x
    z = b.op("exp", x)  # 2 reads the new x
    program = b.finish(y, z)
    assert dependencies(program.nodes) == [(), (0,), (1,)]


def test_dead_code() -> None:
    b = ProgramBuilder()
    x = b.input(8)
    kept, dead = b.op("neg", x), b.op("exp", x)
    b.op("abs", dead)
    program = remove_dead(b.finish(kept))
    assert [node.name for node in program.nodes] == ["neg_0"]
    assert {buffer.role for buffer in program.buffers} == {"input", "output"}
