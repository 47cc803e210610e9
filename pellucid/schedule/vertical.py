"""Vertical fusion: kernels merge with the producers of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pellucid.ir.analysis import reads
from pellucid.ir.decision import Decision, DecisionLog, Fact
from pellucid.ir.nodes import Buffer, Extern, Kernel
from pellucid.options import Options
from pellucid.schedule.contractions import casts_operand, check_operands
from pellucid.schedule.fusion_graph import FusionGraph, Group
from pellucid.schedule.inline import follows_totals, inline, reads_few, recipe_of, with_totals
from pellucid.schedule.match_axes import Mismatch
from pellucid.schedule.pair import check_count, check_limits, merge_groups, refusal
from pellucid.schedule.worth import inlining_costs, is_trivial


def fuse_vertically(graph: FusionGraph, options: Options, log: DecisionLog) -> None:
    """Merge each kernel, in program order, with the kernels that it reads from, the nearest one first.

    Before: `b = x + 1`, `c = b * 2`, `m = c.sum(-1)`, `d = c / m` in four kernels.
    After: one kernel.
    """
    for position, node in enumerate(graph.program.nodes):
        if isinstance(node, Kernel) and graph.concerns(node):
            _visit(graph, position, options, log)


def _visit(graph: FusionGraph, position: int, options: Options, log: DecisionLog) -> None:
    """Fuse the node at `position` with the producers of its inputs; inlining may add inputs."""
    nodes = graph.program.nodes
    pending = _writers(graph, position, reads(nodes[position]))
    while pending:
        writer, buffer = pending.pop()
        group, producer = graph.group(position), graph.group(writer)
        if producer is group or buffer not in group.read:
            continue
        before = group.read
        subject = nodes[writer].name, nodes[position].name
        for decision in _Candidate(graph, options, producer, group, position, buffer, subject).fuse():
            log.add(decision)
            if decision.rule == "fuse.inline" and decision.ok:
                added = [name for name in group.read if name not in before]
                pending = sorted([*pending, *_writers(graph, position, added)])


def _writers(graph: FusionGraph, position: int, buffers: Iterable[str]) -> list[tuple[int, str]]:
    """Those of `buffers` that the program writes, each with the position of its writer, in ascending order."""
    written = ((graph.last_writer(buffer, position), buffer) for buffer in buffers)
    return sorted((writer, buffer) for writer, buffer in written if writer is not None)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A candidate for fusion: `group` reads `buffer`, which `producer` writes."""

    graph: FusionGraph
    options: Options
    producer: Group
    group: Group
    position: int
    buffer: str
    subject: tuple[str, str]

    def fuse(self) -> Iterator[Decision]:
        """Try in order: inline producers without loads, merge, inline others if that pays."""
        facts = (("buffer", self.buffer),)
        if isinstance(self.producer.node, Extern):
            yield refusal(self.subject, Mismatch("extern", f"{self.producer.node.op} is a library call"), facts)
            return
        if next(self.producer.kernel.loads(), None) is None:
            inlined = self._inline()
            yield inlined
            if inlined.ok:
                return
        merged = merge_groups(self.graph, self.producer, self.group, self.options)
        if isinstance(merged, Group):
            why = f"{self.subject[1]} reads {self.buffer} at the points that store it"
            yield Decision("fuse.vertical", self.subject, True, why, facts)
            return
        yield refusal(self.subject, merged, facts)
        if next(self.producer.kernel.loads(), None) is not None:
            yield self._inline()

    def _inline(self) -> Decision:
        facts: tuple[tuple[str, Fact], ...] = (("buffer", self.buffer),)
        kernel, totals = self.producer.kernel, tuple[Buffer, ...]()
        if follows_totals(kernel, self.buffer) and reads_few(self.group.kernel, self.graph.buffers[self.buffer]):
            kernel, totals = with_totals(kernel, self.buffer, set(self.graph.buffers))
        recipe = recipe_of(kernel, self.buffer)
        if isinstance(recipe, Mismatch):
            return self._refused(recipe, facts)
        inlined = inline(self.graph, recipe, self.producer, self.group)
        if isinstance(inlined, Mismatch):
            return self._refused(inlined, facts)
        refused = check_operands(self.group.kernel, inlined.kernel)
        if refused is not None:
            return self._refused(refused, facts)
        if not is_trivial(recipe) and not casts_operand(inlined.kernel):
            pays, numbers = inlining_costs(self.graph, recipe, self.producer, self.group, inlined)
            facts += numbers
            if not pays:
                return self._refused(Mismatch("cost", "computing it again costs more than loading it"), facts)
        refused = check_count(self.graph, self.options) or check_limits(inlined.kernel, self.options)
        if refused is not None:
            return self._refused(refused, facts)
        if totals:
            self.graph.store_more(self.producer, kernel, totals)
        self.graph.inline(self.group, inlined.kernel, self.producer, self.position)
        return Decision(
            "fuse.inline", self.subject, True, f"computing {self.buffer} again is cheaper than loading it", facts
        )

    def _refused(self, mismatch: Mismatch, facts: tuple[tuple[str, Fact], ...]) -> Decision:
        facts = (("category", mismatch.category), *facts)
        return Decision("fuse.inline", self.subject, False, mismatch.why, facts)
