"""The texts that the commands of the kit print."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from pellucid.kit.debug.bisect import Bisected
from pellucid.kit.debug.cache import Carried, Listed, Sizes, Trimmed, Verified, cache_text
from pellucid.kit.debug.capture import CapturedRun, Replay
from pellucid.kit.debug.check import ABOUT_AGAIN, AGAIN, Checked, Culprit
from pellucid.kit.debug.cosim import Cosimulated
from pellucid.kit.debug.diff import Changes
from pellucid.kit.debug.doctor import BAD, WARNING, Doctored
from pellucid.kit.debug.explain import Explanation
from pellucid.kit.debug.launch import Launch, launch_text
from pellucid.kit.debug.match import Matches
from pellucid.kit.debug.reasons import KINDS, Reasons
from pellucid.kit.debug.simulation import COMPLETE, Difference
from pellucid.kit.debug.testgen import Tests
from pellucid.kit.debug.user_program import Faulty
from pellucid.kit.debug.zoom import Inner
from pellucid.kit.diagnose import Diagnosis
from pellucid.kit.judge.judge import Judgement, Output, Verdict
from pellucid.kit.metrics.summary import Summary, summary_text
from pellucid.kit.minify.minify import Minified
from pellucid.kit.process.child import Failure
from pellucid.kit.profile.result import Comparison, Profile
from pellucid.kit.profile.table import comparison_text, headline, profile_text
from pellucid.kit.report.request import Reported
from pellucid.kit.subjects.refusals import Refusal
from pellucid.printing import Part, Sentence, Table, code, name, place, relative, sentence

_NOT_DONE = {
    "fusion": "not fused",
    "vectorisation": "not vectorised",
    "fallback": "not compiled: library calls",
    "call by Python": "not in any program: called by Python between programs",
    "graph break": "graph breaks",
    "recompilation": "recompilations",
}
_STYLES = {Verdict.OK: "green", Verdict.ROUNDING: "green"}
_MEANINGS = {
    Verdict.OK: "the compiled program matches eager bit for bit",
    Verdict.ROUNDING: "the compiled program differs from eager by rounding only",
    Verdict.UNSURE: "it cannot be determined whether the compiled program is wrong",
    Verdict.WRONG: "the compiled program is wrong",
    Verdict.ERROR: "compiling or running it raised an exception",
    Verdict.CRASH: "compiling or running it crashed the process",
    Verdict.HANG: "compiling or running it exceeded the time limit",
}


_MAX_ROWS = 10  # rows of one kind that are printed; `--json` has all of them
_MAX_EXPLAINED = 3  # rows whose error is also described in words
_MAX_INSIDE = 4  # unobserved results that are printed
_LINES = 6  # lines of a changed plan that are printed
_ONE_LINE = 62  # maximum columns of an example and its position on one line
_BAD = "bold red"
_NOT_ALONE = "but it does not fail in the same way when run alone"
_NUMBERS = frozenset(range(3))
_LEGEND = sentence(("error: difference to float64, in units of the tensor's rms; ulp: difference to eager", "dim"))


def shown(found: Any, **how: Any) -> RenderableType:
    """The text that the command prints for its result. how: options of the functions below."""
    return Group(*_SHOW[type(found)](found, **how))


def _checked(found: Checked) -> Iterator[RenderableType]:
    """A verdict with its evidence, and the step at fault."""
    yield _verdict(found.verdict, f" ({found.backend}): {_MEANINGS[found.verdict]}")
    if found.variation:
        yield sentence(f"with inputs varied: {found.variation}")
    elif found.tried > 1:
        yield sentence(f"{_count(found.tried - 1, 'variation')} of the inputs tried too")
    if found.failure is not None:
        yield from _failure(found.failure)
    if found.step is not None:
        yield from _culprit(found.step)
    if found.outputs:
        yield from _outputs(found.outputs)


def _outputs(outputs: Sequence[Output]) -> Iterator[RenderableType]:
    """The bad outputs, the worst first and buffers after results of the program; the good ones are counted."""
    bad = {output.name: output for output in outputs if not output.verdict.good}
    rows = [each for each in bad.values() if not each.name.endswith(AGAIN) or each.name.removesuffix(AGAIN) not in bad]
    rows.sort(key=lambda each: ("buffer " in each.name, -_share(each.judgement)))
    if rows:
        yield Table(
            ("error", "allowed", "ulp", "tensor"),
            [_output(each, n < _MAX_EXPLAINED) for n, each in enumerate(rows[:_MAX_ROWS])],
            right=_NUMBERS,
        )
        if len(bad) > len(rows[:_MAX_ROWS]):
            yield sentence(f"and {len(bad) - len(rows[:_MAX_ROWS])} more")
        if any(each.name.endswith(AGAIN) for each in rows[:_MAX_ROWS]):
            yield sentence(f"{AGAIN.strip(' ()')}: {ABOUT_AGAIN}")
        yield _LEGEND
    good = [output for output in outputs if output.verdict.good]
    if not good:
        return
    rounded = [output for output in good if output.verdict is not Verdict.OK]
    equal = f"{_count(len(good), 'tensor')} compared" if not bad else f"{_count(len(good), 'tensor')} good"
    if rounded:
        worst = max(rounded, key=lambda each: _share(each.judgement))
        equal += f", {len(good) - len(rounded)} bit for bit equal; the closest to its limit is {worst.name}: error"
        equal += f" {worst.judgement.error:.2g}, allowed {worst.judgement.allowed:.2g}"
    yield sentence(equal)


def _output(output: Output, why: bool) -> tuple[Any, ...]:
    """A row. why: describe the error in words, which is always done if the numbers do not show it."""
    found = output.judgement
    words = (sentence(f"{output.dtype}{list(output.shape)}: {found.why}"),) if why or _share(found) <= 1 else ()
    return *_numbers(found), (name(output.name), *words)


def _share(found: Judgement) -> float:
    """The ratio of an error and the allowed error; infinite if no error is allowed, or if it is NaN."""
    share = found.error / found.allowed if found.allowed else math.inf if found.error else 0.0
    return math.inf if math.isnan(share) else share


def _bisected(found: Bisected) -> Iterator[RenderableType]:
    """The component at fault, the step in it, and the verdicts that led to it."""
    if found.good:
        yield from _checked(found.checked)
        return
    yield sentence("at fault: ", (found.component, _BAD), f" ({found.backend})")
    yield from _culprit(found.culprit) if found.culprit else ()
    other = " (another failure, not followed)"
    rows = [(each.component, _verdict(each.verdict, other * each.other)) for each in found.tried]
    yield Table(("used up to", "verdict"), rows)


def _culprit(step: Culprit) -> Iterator[RenderableType]:
    """The step at fault and its graph, the FX nodes that it implements, and the user's lines."""
    called = f", called as {step.kernel}" if step.kernel else ""
    yield code((f"{step.op}{called}" if step.op else f"kernel {step.kernel}") + f" of graph {step.graph}")
    if step.line:
        yield code(f"  C++ line {step.line}")
    if step.inside:
        yield from _inside(step.inside)
    else:
        yield sentence(f"  FX nodes: {', '.join(step.fx_nodes) or 'none'}", hang=4)
        yield from (place(line, "  at ") for line in step.user_lines)
    if step.fused:
        parts = (", ".join(nodes) or "memory" for nodes in (step.fused.first, step.fused.second))
        first = f"  wrong from fusion {step.fused.number} of {step.fused.count} on: "
        yield sentence(first + " with ".join(parts), hang=4)


def _inside(inner: Inner) -> Iterator[RenderableType]:
    """The first wrong operator inside a kernel."""
    scalar = f", in it {inner.scalar}" if inner.scalar and inner.scalar not in inner.fx_node else ""
    yield sentence("  the first wrong operator inside it: ", (inner.fx_node, _BAD), scalar, hang=4)
    if inner.user_line:
        yield place(inner.user_line, "  at ")
    evidence = f"  {_count(inner.values, 'value')} compared, of {inner.seen_in}; {inner.judgement.why}"
    yield sentence(evidence, hang=4)


def _cosimulated(found: Cosimulated) -> Iterator[RenderableType]:
    """The wrong results, the first one first, or the largest error if there is none."""
    mode = "each step is given eager's results" if found.mode == COMPLETE else "observed while the program runs"
    mode += f", against {found.against}" if found.against != "eager" else ""
    seen = f"{_count(len(found.differences), 'result')} compared, {found.unseen} inside kernels ({mode})"
    yield _verdict(found.verdict, f" ({found.backend}): {seen}")
    wrong = [each for each in found.differences if not each.verdict.good]
    if not wrong:
        worst = max((each.judgement.error for each in found.differences), default=0.0)
        yield sentence(f"largest error {worst:.2g}, in units of the rms of the result")
        return
    yield Table(
        ("error", "allowed", "ulp", "result, the first wrong one first"),
        [_difference(each, number < _MAX_EXPLAINED) for number, each in enumerate(wrong[:_MAX_ROWS])],
        right=_NUMBERS,
    )
    if len(wrong) > _MAX_ROWS:
        yield sentence(f"and {len(wrong) - _MAX_ROWS} more")
    first = found.first_divergence
    if first is not None and first.inner is not None:
        yield code(f"kernel {first.kernel} of graph {first.graph}")
        yield from _inside(first.inner)
    elif first is not None and first.opened:
        yield sentence(f"none of the inner values of kernel {first.kernel} is wrong when they are stored")
    yield _LEGEND


def _difference(found: Difference, why: bool) -> tuple[Any, ...]:
    """A row. why: describe the error in words too."""
    where = f" of graph {found.graph}" if found.graph else ", before the graphs"
    what: list[Part] = [name(found.fx_node), name(found.kernel, "by ", where)]
    what += [place(found.user_line, "at ")] if found.user_line else []
    what += [*_unobserved(found), sentence(found.judgement.why)] if why else []
    return *_numbers(found.judgement), what


def _unobserved(found: Difference) -> Iterator[Part]:
    """The unobserved operands of a wrong result, which may be at fault instead."""
    if found.inner is not None:
        return
    if found.unobserved:
        yield sentence("or one of its operands, which are inside kernels and were not observed:")
    for each in found.unobserved[:_MAX_INSIDE]:
        yield place(each.user_line, f"  {each.fx_node} at ") if each.user_line else name(each.fx_node, "  ")
    if len(found.unobserved) > _MAX_INSIDE:
        yield sentence(f"  and {len(found.unobserved) - _MAX_INSIDE} more")


def _captured(found: CapturedRun) -> Iterator[RenderableType]:
    """The graphs of a new run, with the verdicts on their compiled code."""
    rows = [(each.name, str(each.calls), _verdict(each.verdict), str(each.failure or "")) for each in found.graphs]
    failed = any(each.failure for each in found.graphs)
    names = ("graph", "calls", "verdict", "failure")
    yield Table(names if failed else names[:-1], rows if failed else [row[:-1] for row in rows], right=frozenset((1,)))
    size = f"{found.megabytes:.3g} MB of tensors, {_count(found.kernels, 'different kernel')} of {found.backend}"
    yield sentence(f"{relative(found.folder)}: {size}")


def _replayed(found: Replay) -> Iterator[RenderableType]:
    """For each graph the verdict here, the verdict in the run, and the results that differ from the run."""
    names = ("graph", f"here ({found.backend})", f"in the run ({found.captured_by})", "different from the run")
    rows = []
    for graph in found.graphs:
        moved = [sentence(f"{each.name}: {each.judgement.why}") for each in graph.moved[:3]]
        nothing = [sentence("nothing" if graph.recorded else "the run has no saved results")]
        rows.append((graph.graph, _verdict(graph.verdict), graph.before, moved or nothing))
    yield Table(names, rows)
    for graph in found.graphs:
        if not graph.verdict.good:
            yield from _checked(graph.checked)


def _tests(found: Tests) -> Iterator[RenderableType]:
    """The kernels without a test, with the reason, and how to run the tests of the others."""
    yield from (sentence(f"no test for {test.symbol}: {test.why}") for test in found.tests if not test.file)
    if not found.files:
        yield sentence("there is no kernel to test")
        return
    folder = relative(str(Path(found.files[0]).parent))
    yield sentence(f"{_count(len(found.files), 'kernel test')}: run with `pytest {folder}`")


def _changes(found: Changes) -> Iterator[RenderableType]:
    """What changed, by kind; long texts are truncated, `--json` has all of them."""
    if not found.changed:
        yield sentence("nothing changed")
        return
    yield code(f"- {relative(found.before)}\n+ {relative(found.after)}")
    rows = []
    for each in found.changed:
        sides = [
            part for sign, text in (("- ", each.before), ("+ ", each.after)) for part in _side(each.kind, sign, text)
        ]
        rows.append((each.kind, (sentence(each.what, hang=2), *sides)))
    yield Table((), rows)


def _doctored(found: Doctored) -> Iterator[RenderableType]:
    """The checks, the bad ones first; then the figures of the machine."""
    styles = {BAD: _BAD, WARNING: "yellow"}
    rows = []
    for check in found.checks:
        texts = [sentence(check.found)] + ([sentence(f"remedy: {check.remedy}", hang=8)] if check.remedy else [])
        rows.append((Text(check.verdict, style=styles.get(check.verdict, "green")), check.name, texts))
    yield Table((), rows)
    if found.machine is None:
        return
    figures, spread = found.machine.figures, found.machine.spread
    yield sentence("")
    pairs = [name.removesuffix(".one") for name in figures if name.endswith(".one")]
    both = [
        (_figure(figures[f"{each}.one"]), _figure(figures[f"{each}.all"]), _unsteady(spread, each)) for each in pairs
    ]
    rows = [(each, *numbers) for each, numbers in zip(pairs, both, strict=True)]
    rows += [(name, _figure(figures[name]), "", f"ns  ±{spread.get(name, 0) / 2:.0%}") for name in _COSTS]
    yield Table(("", "one thread", f"all {found.machine.cores}", ""), rows, right=frozenset((1, 2)))


_COSTS = ("barrier", "call", "dispatch", "page", "latency")


def _figure(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _unsteady(spread: Mapping[str, float], name: str) -> str:
    """The unit, and half the interquartile range of the measurements."""
    unit = "GB/s" if name.endswith(("read", "write")) else "GFLOP/s"
    return f"{unit}  ±{max(spread.get(f'{name}.one', 0), spread.get(f'{name}.all', 0)) / 2:.0%}"


def _side(kind: str, sign: str, text: str) -> list[Part]:
    if kind in ("kernel", "plan"):
        return [code(_short(text), sign)] if text else []
    return [sentence(f"{sign}{line}", hang=2) for line in text.splitlines()]


def _short(text: str) -> str:
    lines = text.splitlines()
    more = [f"... and {_count(len(lines) - _LINES, 'line')} more"] if len(lines) > _LINES else []
    return "\n".join([*lines[:_LINES], *more])


def _matched(found: Matches, source: bool = False) -> Iterator[RenderableType]:
    """Each kernel with what it implements. source: also print its annotated C++."""
    for kernel in found.kernels:
        yield sentence((kernel.kernel, "bold"), f" of graph {kernel.graph}")
        rows: tuple[tuple[str, Sequence[str], Callable[[str], Part]], ...] = (
            ("C++", (kernel.symbol,), code),
            ("IR", tuple(filter(None, (" ".join(kernel.ir_ops),))), sentence),
            ("FX nodes", kernel.fx_nodes, code),
            ("your lines", kernel.user_lines, place),
        )
        yield Table((), [(what, [part(text) for text in texts]) for what, texts, part in rows if texts])
        if source:
            yield code(kernel.annotated)
    unmatched = sum(not kernel.fx_nodes for kernel in found.kernels)
    calls = _count(len(found.calls), "library call")
    yield sentence(f"{_count(len(found.kernels), 'kernel')}, {unmatched} of them unmatched, and {calls}")


def _minified(found: Minified) -> Iterator[RenderableType]:
    """The reduced graph, how much it was reduced, and the program that shows the failure."""
    if found.good:
        yield sentence(f"nothing fails ({found.backend}): there is nothing to minify")
        return
    size = f"from {_count(found.nodes_before, 'node')} to {found.nodes_after}, in {found.queries} queries"
    yield sentence((str(found.kind), _BAD), f" ({found.backend}): reduced {size} and {found.seconds:.1f} s")
    if found.before is not None:
        yield from _before(found.before)
    else:
        yield code(found.graph)
    if found.changes:
        yield sentence(f"its inputs were changed: {', '.join(found.changes)}")
    yield code(f"repro: {relative(found.repro)}")
    yield sentence("it reproduces the failure" if found.shown else _NOT_ALONE)
    if not found.finished:
        yield sentence("the budget was exhausted before the search was done")
    if found.others:
        yield sentence(f"other failures occurred and were not followed: {', '.join(found.others)}")


def _diagnosed(found: Diagnosis) -> Iterator[RenderableType]:
    """The page of a diagnosis: verdict, what is at fault and where, the program that shows it, the tools that ran."""
    yield _verdict(found.verdict, f" ({found.backend}): {_MEANINGS[found.verdict]}")
    smallest = found.minified if found.minified is not None and not found.minified.good else None
    judgement = found.divergence.judgement if found.divergence is not None else None
    refused = found.reasons if found.reasons is not None and found.reasons.refused else None
    rows: list[tuple[str, Any]] = [
        ("failure", sentence(str(found.checked.failure)) if found.checked.failure is not None else None),
        ("component", sentence((found.bisected.component, _BAD)) if found.bisected is not None else None),
        ("kernel", code(found.kernel) if found.kernel else None),
        ("operator", sentence(", ".join(found.fx_nodes)) if found.fx_nodes else None),
        ("your line", tuple(place(line) for line in found.user_lines)),
        ("why", sentence(judgement.why) if judgement is not None else None),
        ("cause", sentence(refused.cause) if refused is not None else None),
        ("hint", sentence(refused.hint) if refused is not None and refused.hint else None),
        ("repro", code(relative(smallest.repro)) if smallest is not None else None),
        ("", sentence(_NOT_ALONE) if smallest is not None and not smallest.shown else None),
    ]
    shown_rows = [(what, value) for what, value in rows if value]
    if shown_rows:
        yield Table((), shown_rows)
    yield sentence(("what was done", "bold"))
    done = [(each.tool, f"{each.seconds:.0f} s", sentence(each.found)) for each in found.stages]
    yield Table((), done, right=frozenset((1,)))
    yield sentence(("what to do next", "bold"))
    for why, command in _next_steps(found, smallest):
        yield sentence((f"  # {why}", "dim"), hang=4)
        yield code(command, "  ")


def _next_steps(found: Diagnosis, smallest: Minified | None) -> Iterator[tuple[str, str]]:
    """What to inspect next, and the command for it."""
    target = found.target if found.backend == "pellucid" else f"{found.target} --backend {found.backend}"
    if found.good:
        yield "what was not fused, vectorised or compiled, and why", f"pellucid explain {target}"
        return
    if smallest is not None:
        what = "the failure alone" if smallest.shown else "what is left of the program"
        yield f"{what}, {_count(smallest.nodes_after, 'node')}", f"python {relative(smallest.repro)}"
    if found.kernel and found.verdict is not Verdict.ERROR:
        yield "the kernel's C++ next to your lines", f"pellucid match {target} --source"
    yield "all generated code, to inspect, edit or share", f"pellucid capture {target}"


def _before(fault: Faulty) -> Iterator[RenderableType]:
    """A fault in a stage before the graphs."""
    stage = (", ", (fault.stage, _BAD)) if fault.stage else ()
    yield sentence("the graphs are correct: the fault is in an earlier stage", *stage)
    if fault.op:
        yield sentence("the first wrong operator is ", (fault.op, _BAD))
        yield place(fault.user_line, "  at ")


def _failure(found: Failure, *before: tuple[str, str]) -> Iterator[RenderableType]:
    """How a call failed, the user's line if it is known, and a hint."""
    yield sentence(*before, str(found))
    if "user line" in found.context:
        yield place(found.context["user line"], "  at ")
    if found.context.get("hint"):
        yield sentence(("hint: ", "bold"), found.context["hint"])


def _explained(found: Reasons) -> Iterator[RenderableType]:
    """A compile error from the compiler's message to the user's line; or missed optimisations, by kind."""
    if found.refused:
        yield from _explanation(found)
    if found.failure is not None:
        yield from _failure(found.failure, ("it does not compile: ", _BAD))
    if found.good and not found.refusals:
        yield sentence(f"{found.backend} compiled everything, with no missed optimisations")
    for kind in KINDS:
        refusals = [each for each in found.refusals if each.kind == kind]
        if refusals:
            yield sentence((_NOT_DONE[kind], "bold"))
            yield _refusals(refusals)
    if found.variants:
        yield sentence(("kernels with several variants", "bold"))
        yield from map(sentence, found.variants)
    if found.starts:
        yield sentence(("how its graphs start", "bold"))
        counted = Counter(map(str, found.starts)).items()
        yield Table(("graphs", "how, and why"), [(str(count), sentence(each)) for each, count in counted])


def _explanation(found: Explanation) -> Iterator[RenderableType]:
    yield sentence(("the C++ compiler refused a kernel", _BAD))
    rows = (
        ("message", sentence(found.message)),
        ("stopped at line", code(found.error_line)),
        ("faulty line", code(found.cpp_line)),
        ("kernel", code(found.kernel)),
        ("operator", code(found.ir_op)),
        ("FX node", sentence(found.fx_node)),
        ("your line", place(found.user_line)),
        ("cause", sentence(found.cause)),
        ("hint", sentence(found.hint)),
    )
    yield Table((), rows)


def _refusals(refusals: Sequence[Refusal]) -> Table:
    """Each cause once, the most frequent first, with its count and its first example."""
    by_cause: dict[str, list[Refusal]] = {}
    for each in refusals:
        by_cause.setdefault(each.cause, []).append(each)
    causes = sorted(by_cause.items(), key=lambda item: -len(item[1]))
    rows = [(str(len(each)), (sentence(cause), *_example(each[0]))) for cause, each in causes]
    return Table(("times", "cause, and an example"), rows, right=frozenset((0,)))


def _reported(found: Reported) -> Iterator[RenderableType]:
    """The path of the page, with the headline and the first pieces of advice."""
    if found.profile is not None:
        yield from headline(found.profile)
    for each in found.advice[:_MAX_EXPLAINED]:
        yield sentence(f"{each.what} ({each.evidence})", hang=2)
    yield code(f"open {relative(found.page)}")


def _example(refusal: Refusal) -> list[Part]:
    """The subject of a refusal, and its user line."""
    subject = ", ".join(refusal.subject)
    found = place(refusal.user_line, "  at ")
    if not refusal.user_line:
        return [sentence(f"  {subject}", hang=4)] if subject else []
    if subject and len(subject) + sum(map(len, (found.before, found.path, found.after))) <= _ONE_LINE:
        return [place(refusal.user_line, f"  {subject} at ")]
    return [*([sentence(f"  {subject}", hang=4)] if subject else []), found]


def _numbers(found: Judgement) -> tuple[str, str, str]:
    return f"{found.error:.2g}", f"{found.allowed:.2g}", "-" if found.ulp is None else f"{found.ulp:.3g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _verdict(verdict: Verdict, rest: str = "") -> Sentence:
    return sentence((verdict.value, _STYLES.get(verdict, _BAD)), rest)


_SHOW: Mapping[type, Callable[..., Iterator[RenderableType]]] = {
    **dict.fromkeys((Carried, Listed, Sizes, Trimmed, Verified), cache_text),
    Bisected: _bisected,
    CapturedRun: _captured,
    Changes: _changes,
    Checked: _checked,
    Comparison: comparison_text,
    Cosimulated: _cosimulated,
    Diagnosis: _diagnosed,
    Doctored: _doctored,
    Launch: launch_text,
    Matches: _matched,
    Minified: _minified,
    Profile: profile_text,
    Reasons: _explained,
    Replay: _replayed,
    Reported: _reported,
    Summary: summary_text,
    Tests: _tests,
}
