"""The machine model: the rates of this machine, and how long a piece of work takes on it.

`model` is the value, `reference` has the figures used until the machine is measured, `work` counts what kernels move
and compute, `cost` turns that into nanoseconds. `native.measure` measures a machine, `native.machine` stores it.
"""

from pellucid.machine.cost import Estimate, issuing, moving, starting, time
from pellucid.machine.model import Isa, Level, Machine, Rate, rounded, steadied
from pellucid.machine.reference import AVX2, AVX512, REFERENCES
from pellucid.machine.work import Part, Work, kernel_work

__all__ = [
    "AVX2",
    "AVX512",
    "REFERENCES",
    "Estimate",
    "Isa",
    "Level",
    "Machine",
    "Part",
    "Rate",
    "Work",
    "issuing",
    "kernel_work",
    "moving",
    "rounded",
    "starting",
    "steadied",
    "time",
]
