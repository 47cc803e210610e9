"""Generate a test for each kernel: a pytest file with the small FX graph that the kernel implements and its inputs.

The inputs are those of the kernel's operators in eager mode in the program. The tolerance is measured when the test is
written, as in `judge`: from eager's own distance to float64. Run as a script, the file times the kernel and eager.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Template

from pellucid.capture.sizes import sizes_to_json
from pellucid.errors import UserError
from pellucid.kit.judge.graph import expected_of
from pellucid.kit.process.child import SECONDS, Worker
from pellucid.kit.programs.graphs import Graph
from pellucid.kit.runs.kernel import OTHER_KERNELS, parts_with
from pellucid.kit.runs.literal import NotWritable
from pellucid.kit.runs.standalone import standalone
from pellucid.kit.runs.target import Request, captured
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.base import Compiled, Step
from pellucid.kit.subjects.registry import subject_of


@dataclass(frozen=True, slots=True)
class Generated:
    """A test of a kernel. kernels: all of the program that share its C++, as `graph:kernel`. file: empty if none could
    be written. why: the reason then.
    """

    symbol: str
    kernels: tuple[str, ...]
    fx_nodes: tuple[str, ...]
    file: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Tests(Shown):
    """The tests of a program's kernels, one for each distinct kernel."""

    backend: str
    tests: tuple[Generated, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(test.file for test in self.tests if test.file)

    @property
    def good(self) -> bool:
        """Whether every kernel has a test."""
        return all(test.file for test in self.tests)


def testgen(
    request: Request, folder: Path, kernels: Sequence[str] = (), seconds: float = SECONDS, memory: int = 0
) -> Tests:
    """Write a test for each distinct kernel of a program, or for those named (by kernel or symbol), into a folder.

    Raises UserError for a program that does not compile, and for a kernel that it does not have.
    """
    what = (request, str(folder), tuple(kernels))
    refused, hint = f"{request.target} does not compile", "see `pellucid explain`"
    with Worker(memory) as worker:
        return worker.ask(generate, *what, seconds=seconds, refused=refused, hint=hint)


# ------------------------------------------------------------------------------------------------ in the worker


def generate(request: Request, folder: str, kernels: Sequence[str]) -> Tests:
    """Like `testgen`, in this process."""
    graphs, subject = captured(request)
    Path(folder).mkdir(parents=True, exist_ok=True)
    made: dict[str, Generated] = {}
    for graph in graphs:
        compiled = subject.compile(graph)
        steps = [step for step in compiled.steps if step.generated and _is_named(step, kernels)]
        fresh = [step for step in {step.symbol: step for step in reversed(steps)}.values() if step.symbol not in made]
        for test in _tests(graph, compiled, fresh, Path(folder), request):
            made[test.symbol] = test
        for step in steps:
            known = made[step.symbol]
            made[step.symbol] = Generated(
                known.symbol, (*known.kernels, f"{graph.name}:{step.name}"), known.fx_nodes, known.file, known.why
            )
    missing = set(kernels) - {name for test in made.values() for name in _names(test)}
    if missing:
        raise UserError(f"there is no kernel {', '.join(sorted(missing))}", hint="`pellucid match` lists them")
    return Tests(subject.name, tuple(made.values()))


def _is_named(step: Step, kernels: Collection[str]) -> bool:
    return not kernels or step.name in kernels or step.symbol in kernels


def _names(test: Generated) -> Iterator[str]:
    yield test.symbol
    yield from (kernel.partition(":")[2] for kernel in test.kernels)


def _tests(
    graph: Graph, compiled: Compiled, steps: Sequence[Step], folder: Path, request: Request
) -> Iterator[Generated]:
    for step in steps:
        file, why = folder / f"test_{step.symbol}.py", ""
        for part in parts_with(step, graph, compiled, subject_of(request.backend, request.options)):
            try:
                _write(part, step, file, request)
            except NotWritable as error:
                why = f"{type(error).__name__}: {error}"
                continue
            yield Generated(step.symbol, (), step.origin.nodes, str(file))
            break
        else:
            yield Generated(step.symbol, (), step.origin.nodes, "", why or OTHER_KERNELS)


def _write(part: Graph, step: Step, file: Path, request: Request) -> None:
    more = _KERNEL.render(
        tolerances=list(_tolerances(part)),
        kernel=step.fingerprint,
        sizes=sizes_to_json(part.module),
        backend=request.backend,
        options=dict(request.options),
    )
    program = standalone(part, file.parent, file.stem, ("import statistics", "import time"), more)
    users = [str(user) for user in step.origin.users]
    text = _TEXT.render(graph=part.name, step=step, users=users, program=program, kind=part.kind)
    file.write_text(text, encoding="utf-8")


def _tolerances(part: Graph) -> Iterator[float]:
    """For each result, the maximum distance of compiled code from eager."""
    expected = expected_of(part)
    return (float(f"{expected.tolerance(name):.2e}") for name in expected.eager if name.startswith("output"))


_KERNEL = Template('''
from pellucid.runnable import Watched, graph_of, subject_of

# For each result, the maximum distance from eager's, derived from eager's own distance to float64.
TOLERANCES = {{ tolerances }}

# A hash of the kernel's C++. The symbolic sizes of the inputs; None: all sizes are fixed.
KERNEL = "{{ kernel }}"
SIZES = {{ sizes }}
SUBJECT = subject_of("{{ backend }}", {{ options }})
''', keep_trailing_newline=True)  # fmt: skip

_TEXT = Template('''\
"""Kernel {{ step.symbol }} ({{ step.name }} of graph {{ graph }}).

FX nodes: {{ step.origin.nodes | join(", ") | wordwrap(100) }}
{%- for line in users %}
at {{ line }}
{%- endfor %}

`pytest` compares it with eager, and also fails when another kernel runs instead. Run as a script, this file times both.
"""

{{ program }}def graph():
    return graph_of(Graph(), make_inputs(), "{{ kind }}", SIZES)


def run(function):
    torch.manual_seed(0)
    with torch.no_grad():
        return function(*make_inputs())


def test_compiled_as_eager():
    compiled = Watched(graph(), SUBJECT)
    expected, actual = run(Graph()), run(compiled)
    assert KERNEL in compiled.ran, "another kernel implements it now"
    assert len(actual) == len(expected) == len(TOLERANCES)
    for a, e, tolerance in zip(actual, expected, TOLERANCES):
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance, equal_nan=True)


def benchmark(rounds=50):
    """Print the seconds per call of eager and compiled code, called in turn."""
    compiled = SUBJECT.callable(graph())
    calls, inputs = {"eager": Graph(), "compiled": lambda *args: compiled(list(args))}, make_inputs()
    seconds = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call(*inputs)
                seconds[name].append(time.perf_counter() - start)
    for name, each in seconds.items():
        q1, q2, q3 = statistics.quantiles(each, n=4)
        print(f"{name:>8}: median {q2 * 1e6:.1f} us, quartiles {q1 * 1e6:.1f} to {q3 * 1e6:.1f}")


if __name__ == "__main__":
    benchmark()
''', keep_trailing_newline=True)  # fmt: skip
