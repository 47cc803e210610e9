"""The schedule stage: which operators share a kernel, in what order kernels run, and where temporaries are stored."""

from __future__ import annotations

from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Program
from pellucid.machine import AVX2, Machine
from pellucid.options import Options
from pellucid.schedule.cleanup import clean_up
from pellucid.schedule.dead import remove_dead
from pellucid.schedule.few_rows import sum_rows_together
from pellucid.schedule.fuse import fuse
from pellucid.schedule.hoist import hoist
from pellucid.schedule.normalize import normalize
from pellucid.schedule.order import order
from pellucid.schedule.parts import split_parts
from pellucid.schedule.two_phase import split_reductions
from pellucid.schedule.unread import cut_unread

__all__ = ["schedule"]


def schedule(program: Program, options: Options, machine: Machine = AVX2) -> tuple[Program, list[Decision]]:
    """From one kernel per operator to few kernels in a good order, and the decisions that led there.

    machine: for the cost estimates; a reference machine by default.
    """
    decisions: list[Decision] = []
    program = remove_dead(program)
    program = normalize(program)
    if options.fusion:
        program, cut = cut_unread(program)
        program, few = sum_rows_together(program)
        program, fused = fuse(program, options, machine)
        decisions += [*cut, *few, *fused]
        program = remove_dead(program)
    program = remove_dead(clean_up(program))  # a load that repeats another may have been the last use of its buffer
    if options.fusion:
        program, parted, partitioned = split_parts(program, machine)
        decisions += parted
        if partitioned:
            program, fused = fuse(normalize(program), options, machine, partitioned)
            decisions += fused
            program = remove_dead(clean_up(program))
    program, split = split_reductions(program, options)
    decisions += split
    program, hoisted = hoist(program, machine)
    decisions += hoisted
    program, ordered = order(program)
    return program, decisions + ordered
