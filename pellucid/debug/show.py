"""What the commands of the kit print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pellucid.debug.bisect import Bisected
from pellucid.debug.capture import CapturedRun, Replay
from pellucid.debug.check import ABOUT_AGAIN, AGAIN, Checked, Culprit
from pellucid.debug.cosim import COMPLETE, Cosimulated
from pellucid.debug.diff import Changes
from pellucid.debug.explain import Explanation, Refusal
from pellucid.debug.judge import Judgement, Output, Verdict
from pellucid.debug.match import Matches
from pellucid.debug.minify import Minified
from pellucid.debug.reasons import KINDS, Reasons
from pellucid.debug.testgen import Tests

_NOT_DONE = {
    "fusion": "not fused",
    "vectorisation": "not vectorised",
    "fallback": "not compiled: calls of a library",
    "call by Python": "held by no program: calls by Python between programs",
    "graph break": "graph breaks",
    "recompilation": "recompilations",
}
_STYLES = {Verdict.OK: "green", Verdict.ROUNDING: "green"}
_MEANINGS = {
    Verdict.OK: "the compiled program does what eager does, bit for bit",
    Verdict.ROUNDING: "the compiled program differs from eager by rounding only",
    Verdict.UNSURE: "it cannot be told whether the compiled program is wrong",
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


def cosimulated(found: Cosimulated) -> RenderableType:
    """The first wrong result and the others, or that there is none."""
    mode = "each step on eager's results" if found.mode == COMPLETE else "as the program runs"
    mode += f", against {found.against}" if found.against != "eager" else ""
    seen = f"{len(found.differences)} results compared, {found.unseen} lie inside kernels ({mode})"
    first = found.first_divergence
    if first is None:
        worst = max((each.judgement.error for each in found.differences), default=0.0)
        verdict = Text.assemble((found.verdict.value, _style(found.verdict)), f" ({found.backend}): {seen}")
        return Group(verdict, Text(f"largest error {worst:.2g}, in units of the rms of the result"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("kernel", "FX node", "your line", "error", "allowed", "ulp"):
        table.add_column(name, overflow="fold", justify="right" if name in ("error", "allowed", "ulp") else "left")
    wrong = [each for each in found.differences if not each.verdict.good]
    for each in wrong[:10]:
        table.add_row(each.kernel, each.fx_node, each.user_line, *_numbers(each.judgement))
    more = [Text(f"and {len(wrong) - 10} more that are wrong")] if len(wrong) > 10 else []
    head = Text.assemble((found.verdict.value, _style(found.verdict)), f" ({found.backend}): {seen}")
    lead = Text(f"first: {first.fx_node} of graph {first.graph}, made by {first.kernel}: {first.judgement.why}")
    return Group(head, lead, table, *more)


def captured(found: CapturedRun) -> RenderableType:
    """The graphs of a new run, and how compiled code does on them."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("graph", "calls", "verdict", "failure"):
        table.add_column(name, justify="right" if name == "calls" else "left", overflow="fold")
    for graph in found.graphs:
        verdict = Text(graph.verdict.value, _style(graph.verdict))
        table.add_row(graph.name, str(graph.calls), verdict, str(graph.failure or ""))
    size = f"{found.megabytes:.3g} MB of tensors, {found.kernels} different kernels of {found.backend}"
    return Group(table, Text(f"{found.folder}: {size}"))


def replayed(found: Replay) -> RenderableType:
    """Each graph: the verdict here, the one in the run, and what is not as it was."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("graph", f"here ({found.backend})", f"in the run ({found.captured_by})", "other than in the run"):
        table.add_column(name, overflow="fold")
    for graph in found.graphs:
        moved = "; ".join(f"{each.name}: {each.judgement.why}" for each in graph.moved[:3]) or "nothing"
        moved = moved if graph.recorded else "the run has no numbers"
        table.add_row(graph.graph, Text(graph.verdict.value, _style(graph.verdict)), graph.before, Text(moved))
    bad = [line for graph in found.graphs if not graph.verdict.good for line in _checked(graph.checked)]
    return Group(table, *bad)


def tests_written(found: Tests) -> RenderableType:
    """The kernels without a test and why, and how to run the others."""
    missing = [Text(f"no test for {test.symbol}: {test.why}") for test in found.tests if not test.file]
    if not found.files:
        return Group(*missing, Text("there is no kernel to test"))
    folder = Path(found.files[0]).parent
    return Group(*missing, Text(f"{len(found.files)} tests of kernels: run them with `pytest {folder}`"))


_LINES = 6  # of a plan's change that are printed


def changes(found: Changes) -> RenderableType:
    """What changed, by kind; long texts are cut, `--json` has all of them."""
    if not found.changed:
        return Text("nothing changed")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("kind", "what", found.before, found.after):
        table.add_column(name, overflow="fold", ratio=None if name == "kind" else 1)
    for each in found.changed:
        table.add_row(each.kind, Text(_short(each.what)), Text(_short(each.before)), Text(_short(each.after)))
    return table


def _short(text: str) -> str:
    lines = text.splitlines()
    more = [f"... and {len(lines) - _LINES} lines more"] if len(lines) > _LINES else []
    return "\n".join([line if len(line) <= 80 else f"{line[:77]}..." for line in lines[:_LINES]] + more)


def matched(found: Matches, source: bool) -> RenderableType:
    """Each kernel with what it implements, and its annotated C++ if asked."""
    parts: list[RenderableType] = []
    for kernel in found.kernels:
        parts.append(Text.assemble((kernel.kernel, "bold"), f" of graph {kernel.graph} ({kernel.symbol})"))
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        table.add_row("IR", Text(" ".join(kernel.ir_ops)))
        for name, rows in (("FX nodes", kernel.fx_nodes), ("your lines", kernel.user_lines)):
            table.add_row(name, Text("\n".join(rows)))
        parts.append(table)
        if source:
            parts.append(Text(kernel.annotated))
    unmatched = sum(not kernel.fx_nodes for kernel in found.kernels)
    parts.append(
        Text(f"{len(found.kernels)} kernels, {unmatched} of them unmatched, and {len(found.calls)} calls of libraries")
    )
    return Group(*parts)


def minified(found: Minified) -> RenderableType:
    """The graph that is left, how much was cut away, and the program that shows the failure."""
    if found.good:
        return Text(f"nothing fails ({found.backend}): there is nothing to minify")
    head = Text.assemble((str(found.kind), "bold red"), f" ({found.backend}): {found.nodes_before} nodes became ")
    head.append(f"{found.nodes_after}, in {found.queries} queries and {found.seconds:.1f} s")
    lines: list[RenderableType] = [head, Text(found.graph)]
    if found.changes:
        lines.append(Text(f"its inputs were changed: {', '.join(found.changes)}"))
    seen = "it fails so" if found.shown else "but run alone it does not fail so"
    lines.append(Text(f"repro: {found.repro} ({seen})"))
    if not found.finished:
        lines.append(Text("the budget was spent before the search was done"))
    if found.others:
        lines.append(Text(f"other failures were met and not followed: {', '.join(found.others)}"))
    return Group(*lines)


def explained(found: Reasons) -> RenderableType:
    """A compile error from the compiler's message to the user's line; or what was not done, by kind."""
    lines: list[RenderableType] = []
    if found.refused:
        lines += _explanation(found)
    if found.failure is not None:
        lines.append(Text.assemble(("it does not compile: ", "bold red"), str(found.failure)))
    for kind in KINDS:
        refusals = [each for each in found.refusals if each.kind == kind]
        if refusals:
            lines.append(_refusals(kind, refusals))
    return Group(*lines) if lines else Text(f"{found.backend} compiled all of it, and refused nothing")


def _explanation(found: Explanation) -> Iterator[RenderableType]:
    yield Text.assemble(("the C++ compiler refused a kernel", "bold red"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    rows = (
        ("message", found.message),
        ("stopped at line", found.error_line),
        ("to blame, line", found.cpp_line),
        ("kernel", found.kernel),
        ("operator", found.ir_op),
        ("FX node", found.fx_node),
        ("your line", found.user_line),
        ("cause", found.cause),
        ("hint", found.hint),
    )
    for name, value in rows:
        table.add_row(name, Text(value))
    yield table


def _refusals(kind: str, refusals: list[Refusal]) -> Table:
    """Each cause once, with what it hit first and how often."""
    table = Table(box=None, pad_edge=False, header_style="dim", title=_NOT_DONE[kind], title_justify="left")
    for name in ("times", "cause", "for example"):
        table.add_column(name, overflow="fold", justify="right" if name == "times" else "left")
    by_cause: dict[str, list[Refusal]] = {}
    for each in refusals:
        by_cause.setdefault(each.cause, []).append(each)
    for cause, each in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        example = ", ".join(each[0].subject) + (f" at {each[0].user_line}" if each[0].user_line else "")
        table.add_row(str(len(each)), Text(cause), Text(example))
    return table


def culprit(step: Culprit) -> Iterator[RenderableType]:
    """Which call of which graph, what it implements, and the user's lines."""
    what = (
        f"kernel {step.kernel}" if not step.op else f"{step.op}" + (f", called as {step.kernel}" if step.kernel else "")
    )
    yield Text(f"{what} of graph {step.graph}")
    yield Text(f"  FX nodes: {', '.join(step.fx_nodes) or 'none'}")
    for line in step.user_lines:
        yield Text(f"  at {line}")


def _outputs(outputs: tuple[Output, ...]) -> RenderableType:
    """The bad ones first and all of them, the good ones up to ten."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("tensor", "type", "verdict", "error", "allowed", "ulp"):
        table.add_column(name, justify="right" if name in ("error", "allowed", "ulp") else "left", overflow="fold")
    bad = [output for output in outputs if not output.verdict.good]
    good = [output for output in outputs if output.verdict.good]
    for output in (*bad, *good[:10]):
        kind = f"{output.dtype}{list(output.shape)}"
        verdict = Text(output.verdict.value, _style(output.verdict))
        table.add_row(output.name, kind, verdict, *_numbers(output.judgement))
    if len(good) > 10:
        table.add_row(f"and {len(good) - 10} more that are good")
    reasons = [Text(f"{each.name}: {each.judgement.why}") for each in bad[:3]]
    again = [Text(f"{AGAIN.strip(' ()')}: {ABOUT_AGAIN}")] if any(AGAIN in each.name for each in outputs) else []
    return Group(table, *reasons, *again, _LEGEND)


_LEGEND = Text("error: from float64, in units of the tensor's rms; ulp: from eager", style="dim")


def _numbers(found: Judgement) -> tuple[str, str, str]:
    return f"{found.error:.2g}", f"{found.allowed:.2g}", "-" if found.ulp is None else f"{found.ulp:.3g}"


def _style(verdict: Verdict) -> str:
    return _STYLES.get(verdict, "bold red")
