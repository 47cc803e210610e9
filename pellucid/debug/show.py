"""What the commands of the kit print."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pellucid.debug.bisect import Bisected
from pellucid.debug.check import Checked, Culprit, Output
from pellucid.debug.judge import Verdict

_STYLES = {Verdict.OK: "green", Verdict.ROUNDING: "green"}
_MEANINGS = {
    Verdict.OK: "the compiled program does what eager does, bit for bit",
    Verdict.ROUNDING: "the compiled program differs from eager by rounding only",
    Verdict.WRONG: "the compiled program is wrong",
    Verdict.ERROR: "compiling or running it raised an exception",
    Verdict.CRASH: "compiling or running it ended the process",
    Verdict.HANG: "compiling or running it did not end in time",
}


def checked(found: Checked) -> RenderableType:
    """A verdict, what it rests on, and where to look."""
    return Group(*_checked(found))


def _checked(found: Checked) -> Iterator[RenderableType]:
    yield Text.assemble((found.verdict.value, _style(found.verdict)), f" ({found.backend}): {_MEANINGS[found.verdict]}")
    if found.variation:
        yield Text(f"with inputs varied: {found.variation}")
    elif found.tried > 1:
        yield Text(f"{found.tried} variations of the inputs tried")
    if found.failure is not None:
        yield Text(str(found.failure))
    if found.step is not None:
        yield from culprit(found.step)
    if found.outputs:
        yield _outputs(found.outputs)


def bisected(found: Bisected) -> RenderableType:
    """The component, what in it, and how that was found."""
    if found.good:
        return Group(*_checked(found.checked))
    lines: list[RenderableType] = [Text.assemble("to blame: ", (found.component, "bold red"), f" ({found.backend})")]
    lines += culprit(found.culprit) if found.culprit else []
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("used up to")
    table.add_column("verdict")
    for tried in found.tried:
        table.add_row(tried.component, Text(tried.verdict.value, _style(tried.verdict)))
    return Group(*lines, table)


def culprit(step: Culprit) -> Iterator[RenderableType]:
    """Which call of which graph, what it implements, and the user's lines."""
    what = (
        f"kernel {step.kernel}" if not step.op else f"{step.op}" + (f", called as {step.kernel}" if step.kernel else "")
    )
    yield Text(f"{what} of graph {step.graph}")
    yield Text(f"  FX nodes: {', '.join(step.fx_nodes) or 'none'}")
    for line in step.user_lines:
        yield Text(f"  at {line}")


def _outputs(outputs: tuple[Output, ...]) -> Table:
    """The bad ones first and all of them, the good ones up to ten."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("tensor", "type", "verdict", "error", "allowed", "ulp"):
        table.add_column(name, justify="right" if name in ("error", "allowed", "ulp") else "left", overflow="fold")
    bad = [output for output in outputs if not output.verdict.good]
    good = [output for output in outputs if output.verdict.good]
    for output in (*bad, *good[:10]):
        found = output.judgement
        numbers = (f"{found.error:.2g}", f"{found.allowed:.2g}", f"{found.ulp:.3g}")
        kind = f"{output.dtype}{list(output.shape)}"
        table.add_row(output.name, kind, Text(output.verdict.value, _style(output.verdict)), *numbers)
        if found.why:
            table.add_row("", "", Text(found.why), "", "", "")
    if len(good) > 10:
        table.add_row(f"and {len(good) - 10} more that are good")
    return table


def _style(verdict: Verdict) -> str:
    return _STYLES.get(verdict, "bold red")
