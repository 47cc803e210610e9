"""How much of the planted faults the kit finds: `python -m tests.kit.score [NAME ...]` prints a table and totals.

Each fault goes through `bisect`, whose first attempt is `check`, and, where it shows as wrong numbers, through both
modes of `cosim`. With `--into FILE` the answers are kept, a line of JSON per fault, and those that are there are not
asked for again.
"""

from __future__ import annotations

import argparse
import json
import linecache
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from pellucid.errors import PellucidError
from pellucid.kit.debug.bisect import bisect
from pellucid.kit.debug.cosim import cosim_request
from pellucid.kit.debug.simulation import COMPLETE, LIVE
from pellucid.kit.process.child import Failure
from pellucid.kit.process.forks import Forks
from pellucid.kit.runs.target import Request
from pellucid.kit.subjects.registry import subject_of
from tests.kit import real_models
from tests.kit.faults import FAULTS, QUICK
from tests.kit.planted import Fault

MEMORY = 4 << 30
THREADS = 2
FIRST = "tests.kit.score:first_divergence"
KERNELS = ("codegen", "vectorisation", "lowering")


def request_of(fault: Fault) -> Request:
    """The fault as a target of the kit."""
    return Request(f"{fault.file}:{fault.name}", fault.subject, backward=fault.backward)


def seconds_of(fault: Fault) -> float:
    """How long an attempt may take: a hang costs all of it."""
    return 45.0 if fault.verdict == "hang" else 300.0


def shows_in_kernels(fault: Fault) -> bool:
    """Whether the result of one kernel is wrong, whatever runs around it."""
    return fault.verdict == "wrong" and fault.component in KERNELS


def shows_in_cosim(fault: Fault) -> bool:
    """Whether it is there to be seen beside eager, and has a place."""
    return fault.verdict == "wrong" and bool(fault.culprit)


def names_it(fault: Fault, nodes: Sequence[str]) -> bool:
    """Whether the culprit, and no other operator, is what a tool names; of a fault of fusion, the two that it fused."""
    most = 2 if fault.component == "fusion" else 1
    return len(nodes) <= most and any(node == fault.culprit or _operator(node) == fault.culprit for node in nodes)


def _operator(node: str) -> str:
    """The operator of an FX node, without what sets its overloads and calls apart: `native_layer_norm_3`."""
    return re.sub(r"_\d+$", "", node).removeprefix("_").removeprefix("native_")


# What stands in the lines that call an operator, where that is not its name.
IN_CODE = {
    "add": r"\+", "add_1": r"\+", "batch_norm": "batch_norm",
    "convert_element_type": r"\.to\(|Norm", "convolution": "conv",
    "convolution_backward": "conv|down|inner|up|leave",
    "clone": "clone|contiguous", "copy_": "add_",
    "embedding": "embed|wte|word", "embedding_dense_backward": "embed|wte|word", "erf": "gelu|act",
    "exp": "exp|silu|softmax",
    "gelu": "gelu|act", "gelu_backward": "gelu|act", "layer_norm": "norm|ln", "layer_norm_backward": "norm|ln",
    "log": "cross_entropy|loss|log",
    "log_softmax": "cross_entropy|loss", "log_softmax_backward_data": "cross_entropy|loss",
    "hardtanh": "act", "max_pool2d": "pool", "max_pool2d_with_indices": "pool",
    "mm": "@", "mul": r"\*", "mul_3": "gelu", "neg": "neg|-x2",
    "permute": "permute|dense|linear|query",
    "relu": "relu|activation", "rsqrt": r"norm|Norm|rsqrt|super\(\)\.forward",
    "silu": "silu|act", "silu_backward": "silu", "sqrt": "norm|sqrt",
    "sub": " - ", "sum_1": "sum", "t": "dense|linear|query",
    "threshold_backward": "relu|activation", "to_copy": r"\.to\(", "var_mean": "norm",
}  # fmt: skip


def reads_it(fault: Fault, lines: Sequence[str]) -> bool:
    """Whether one of the user's lines that a tool names, and it names no two, calls the culprit."""
    if len(set(lines)) > (2 if fault.component == "fusion" else 1):
        return False
    said = [linecache.getline(*_place(line)) for line in lines]
    pattern = IN_CODE.get(fault.culprit, IN_CODE.get(_operator(fault.culprit), _operator(fault.culprit)))
    return any(re.search(pattern, text) for text in said)


def _place(line: str) -> tuple[str, int]:
    file, _, number = line.partition(" (")[0].rpartition(":")
    return file, int(number)


@dataclass(frozen=True, slots=True)
class Named:
    """What a tool blames. nodes: FX nodes or operators. lines: `file:line`. inside: whether a kernel was opened."""

    nodes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    kernel: str = ""
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What the tools say of a fault. cosim: by mode. seconds: that each tool took."""

    name: str
    verdict: str = ""
    component: str = ""
    tried: tuple[str, ...] = ()
    bisect: Named = Named()
    cosim: Mapping[str, Named] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def ask(fault: Fault) -> Answer:
    """Run the tools on a fault."""
    request, start = request_of(fault), time.monotonic()
    try:
        found = bisect(request, seconds_of(fault), MEMORY, lambda _: None, forked)
    except PellucidError as error:
        return Answer(fault.name, f"({error})")
    culprit = found.culprit
    named = (
        Named(culprit.fx_nodes, culprit.user_lines, culprit.kernel, culprit.inside is not None or bool(culprit.line))
        if culprit
        else Named()
    )
    seconds, cosim = {"bisect": round(time.monotonic() - start, 1)}, {}
    if shows_in_cosim(fault):
        with forked(MEMORY) as worker:
            for mode in (COMPLETE, LIVE):
                start = time.monotonic()
                cosim[mode] = worker.call(FIRST, request, mode, seconds=seconds_of(fault))
                seconds[mode] = round(time.monotonic() - start, 1)
    said = {mode: Named((f"({it})",)) if isinstance(it, Failure) else it for mode, it in cosim.items()}
    tried = tuple(f"{each.component}: {each.verdict.value}{' (other)' * each.other}" for each in found.tried)
    return Answer(fault.name, found.checked.verdict.value, found.component, tried, named, said, seconds)


def warm_up() -> None:
    """Import once what the tools and the models need."""
    torch.set_num_threads(1)  # see `forks`
    for subject in ("pellucid", "inductor"):
        subject_of(subject).warm_up()
    for model in (real_models.bert, real_models.llama, real_models.resnet, real_models.gpt2_training):
        model()


def forked(memory: int) -> Forks:
    """A process to ask the tools in, which has imported what they need: that takes seconds each time."""
    return Forks(threads=THREADS, memory=memory)


def first_divergence(request: Request, mode: str) -> Named:
    """In a worker process: what `cosim` finds first."""
    first = cosim_request(request, mode).first_divergence
    if first is None:
        return Named()
    lines = (first.operator_line,) if first.operator_line else ()
    return Named((first.operator,), lines, first.kernel, first.opened)


def wrong(fault: Fault, answer: Answer) -> Iterator[str]:
    """What the tools were wrong about: `verdict`, `component`, and by tool `operator` and `line`."""
    if answer.verdict != fault.verdict:
        yield "verdict"
    if answer.component != fault.component:
        yield "component"
    if fault.culprit:
        for tool, named in {"bisect": answer.bisect, **answer.cosim}.items():
            if not names_it(fault, named.nodes):
                yield f"{tool} operator"
            if not reads_it(fault, named.lines):
                yield f"{tool} line"


def row(fault: Fault, answer: Answer) -> str:
    """A line of the table."""
    mistakes = ", ".join(wrong(fault, answer))
    said = [f"{answer.verdict} {answer.component}"]
    for tool, named in {"bisect": answer.bisect, **answer.cosim}.items():
        lines = ",".join(Path(line).name for line in named.lines)
        said.append(f"{tool}: {','.join(named.nodes) or '-'} {lines}")
    seconds = sum(answer.seconds.values())
    return f"{fault.name:45} {'; '.join(said):150} {seconds:4.0f} s  {f'WRONG ({mistakes})' if mistakes else 'right'}"


def totals(answers: Sequence[Answer]) -> Iterator[str]:
    """By subject and for both, how many faults there are and how many are right in each way."""
    for subject in ("pellucid", "inductor", ""):
        some = [(FAULTS[each.name], each) for each in answers if subject in ("", FAULTS[each.name].subject)]
        mistakes = [(fault, set(wrong(fault, answer)), answer) for fault, answer in some]
        parts = [f"{subject or 'both'}: {len(some)} faults"]
        parts += [f"{what} {sum(what not in m for _, m, _ in mistakes)}" for what in ("verdict", "component")]
        for tool in ("bisect", COMPLETE, LIVE):
            asked = [m for fault, m, answer in mistakes if fault.culprit and (tool == "bisect" or tool in answer.cosim)]
            right = [sum(f"{tool} {what}" not in m for m in asked) for what in ("operator", "line")]
            parts.append(f"{tool} operator {right[0]} and line {right[1]} of {len(asked)}")
        yield ", ".join(parts)


def read(file: Path) -> dict[str, Answer]:
    """The answers that were kept, by fault."""
    found: dict[str, Answer] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        kept = json.loads(line)
        cosim = {mode: Named(**named) for mode, named in kept["cosim"].items()}
        found[kept["name"]] = Answer(**{**kept, "bisect": Named(**kept["bisect"]), "cosim": cosim})
    return found


def third(faults: Sequence[str], number: int) -> list[str]:
    """A third of some faults, neighbours in different ones."""
    return sorted(faults)[number % 3 :: 3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of faults")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="keep the answers, and ask for no more than is missing"
    )
    parser.add_argument("--quick", type=int, metavar="N", help="the Nth third of those that are found quickly")
    given = parser.parse_args()
    names = list(FAULTS) if given.quick is None else third(sorted(QUICK), given.quick)
    chosen = [FAULTS[name] for name in dict.fromkeys(n for part in given.names or [""] for n in names if part in n)]
    known = read(given.into) if given.into else {}
    if any(fault.name not in known for fault in chosen):
        warm_up()
    answers: list[Answer] = []
    for fault in chosen:
        answer = known.get(fault.name) or ask(fault)
        if given.into and fault.name not in known:
            with given.into.open("a") as file:
                file.write(json.dumps(asdict(answer)) + "\n")
        answers.append(answer)
        print(row(fault, answer), flush=True)
    print("\n".join(totals(answers)))
    return any(any(wrong(FAULTS[each.name], each)) for each in answers)


if __name__ == "__main__":
    sys.exit(main())
