"""`pellucid run`: run a command in the environment that the doctor recommends; report the changes and the speedup."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug.doctor import Check, process_checks
from pellucid.kit.shown import Shown
from pellucid.kit.stats import Summary, pairwise_ratio, summarise
from pellucid.printing import sentence

PIN = Check(
    "affinity",
    "good",
    "threads move between cores",
    "each thread on a core of its own, for a machine that nothing else uses",
    {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"},
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A recommended environment variable. before: its current value; None if unset. A variable that is set stays.

    check: the doctor's check that recommends it. why: what the check found.
    """

    name: str
    value: str
    before: str | None
    check: str
    why: str

    @property
    def applied(self) -> bool:
        return self.before is None


@dataclass(frozen=True, slots=True)
class Gain:
    """A command run alternately with and without the settings: seconds, and the median page faults per run.

    ratio: the speedup with the settings, pair by pair.
    """

    seconds: Summary
    plain_seconds: Summary
    page_faults: float
    plain_page_faults: float
    ratio: Summary


@dataclass(frozen=True, slots=True)
class Launch(Shown):
    """settings: all that are recommended. code: the exit code of the command. gain: None unless measured."""

    command: tuple[str, ...]
    settings: tuple[Setting, ...]
    code: int = 0
    gain: Gain | None = None

    @property
    def environment(self) -> dict[str, dict[str, str | None]]:
        """The values of the recommended variables `before` and `after`. No others: some hold secrets."""
        return {
            each.name: {"before": each.before, "after": each.value if each.applied else each.before}
            for each in self.settings
        }

    def variables(self) -> dict[str, str]:
        """The whole environment of the command. A method, as the properties of a result are printed with `--json`."""
        return {**os.environ, **{each.name: each.value for each in self.settings if each.applied}}

    @property
    def good(self) -> bool:
        return self.code == 0


def plan(command: Sequence[str], pin: bool = False) -> Launch:
    """What would be set for a command. pin: bind threads to cores too. Raises UserError if there is no such command."""
    if not command or shutil.which(command[0]) is None:
        raise UserError(
            f"there is no command {command[0] if command else ''!r}", hint="pellucid run -- python train.py"
        )
    return Launch(tuple(command), settings_of((*process_checks(), *([PIN] if pin else []))))


def settings_of(checks: Sequence[Check], environment: Mapping[str, str] = os.environ) -> tuple[Setting, ...]:
    """The settings that checks recommend; of two numbers of threads the smaller one."""
    found: dict[str, Setting] = {}
    for check in checks:
        for name, value in check.settings.items():
            known = found.get(name)
            if known is None or (value.isdigit() and int(value) < int(known.value)):
                why = f"{check.found}: {check.remedy}" if check.verdict == "good" else check.found
                found[name] = Setting(name, value, environment.get(name), check.name, why)
    return tuple(found.values())


def replace_process(launch: Launch) -> None:
    """Become the command; does not return."""
    os.execvpe(launch.command[0], launch.command, launch.variables())


def compare(launch: Launch, pairs: int, stdout: int | None = None) -> Launch:
    """Time the command, alternately with and without the settings, `pairs` times each.

    Its output is shown once; stdout: the file descriptor for its stdout, by default this process's. Raises NotJudged
    for a command that fails.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    faults: dict[bool, list[int]] = {True: [], False: []}
    for number in range(pairs):
        for applied in (True, False) if number % 2 == 0 else (False, True):
            begin = time.perf_counter()
            environment = launch.variables() if applied else dict(os.environ)
            code, faulted = _run(launch.command, environment, number == 0 and applied, stdout)
            if code:
                how = "with the settings" if applied else "without them"
                raise NotJudged(f"{launch.command[0]} exits with {code} {how}", hint="run it without --compare")
            seconds[applied].append(time.perf_counter() - begin)
            faults[applied].append(faulted)
    with_them, without = (summarise(seconds[applied]) for applied in (True, False))
    pages, plain_pages = (summarise(faults[applied]).median for applied in (True, False))
    gain = Gain(with_them, without, pages, plain_pages, pairwise_ratio(seconds[False], seconds[True]))
    return Launch(launch.command, launch.settings, 0, gain)


def _run(command: Sequence[str], environment: Mapping[str, str], shown: bool, stdout: int | None) -> tuple[int, int]:
    """The exit code of a command and its page faults, including those of child processes that it waited for."""
    to, errors = (stdout, None) if shown else (subprocess.DEVNULL, subprocess.DEVNULL)
    process = subprocess.Popen(command, env=environment, stdout=to, stderr=errors, stdin=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_minflt


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def launch_text(found: Launch) -> Iterator[RenderableType]:
    """What is set, its value before, and why; and the speedup, if it was measured."""
    if not found.settings:
        yield sentence("nothing to set: the environment is already as recommended")
    for each in found.settings:
        now = f"{each.name}={each.value}" if each.applied else f"{each.name}={each.before} stays, as you set it"
        more = "" if each.applied else f"; the recommended value is {each.value}"
        yield sentence((now, "bold"), f"{more}  ({each.check}: {each.why})", hang=2)
    gain = found.gain
    if gain is not None:
        ratio = gain.ratio
        many = f"quartiles {ratio.q1:.2f} to {ratio.q3:.2f} of {ratio.count} pairs"
        pairs = many if ratio.count > 1 else "of one pair"
        yield sentence(
            f"{ratio.median:.2f} times as fast with it ({pairs}): {_time(gain.seconds.median)}, "
            f"{_time(gain.plain_seconds.median)} without; {gain.page_faults:.0f} page faults, "
            f"{gain.plain_page_faults:.0f} without"
        )
