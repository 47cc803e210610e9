"""The loop nests and the C++ of a handful of kernels, with the decisions behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pellucid.codegen import annotate, generate
from pellucid.codegen.nest_text import print_nest
from pellucid.ir.nodes import Kernel, Line
from pellucid.ir.origin import Origin, UserLine
from pellucid.ir.parser import parse_kernel
from pellucid.machine import AVX512
from pellucid.options import Options
from tests.golden.codegen_cases import CASES


def with_origins(kernel: Kernel) -> Kernel:
    """Origins are not part of the text form; here each line comes from a line of its own."""

    def of(position: int, line: Line) -> Line:
        return replace(line, origin=Origin((line.out,), (UserLine("model.py", position + 1),), ("lower",)))

    return replace(kernel, body=tuple(of(position, line) for position, line in enumerate(kernel.body)))


@pytest.mark.parametrize("name", CASES)
def test_codegen(name: str, golden: Callable[[str, str], None]) -> None:
    kernel = generate(with_origins(parse_kernel(CASES[name])), Options(), AVX512)
    told = "".join(
        f"// {decision.rule} {'yes' if decision else 'no'} {', '.join(decision.subject)}: {decision.why}\n"
        for decision in kernel.decisions
    )
    golden(f"codegen/{name}.cpp", told + annotate(kernel))
    golden(f"codegen/{name}.nest", print_nest(kernel.nest) + "\n")
