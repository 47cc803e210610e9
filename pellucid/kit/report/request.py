"""`pellucid report`: a TARGET is captured and profiled into a run, and a run becomes a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pellucid.errors import UserError
from pellucid.kit.debug.capture import save_compiled, save_graphs
from pellucid.kit.debug.doctor import process_checks
from pellucid.kit.process.child import SECONDS, Worker
from pellucid.kit.profile.compare import compare
from pellucid.kit.profile.limits import known_machine
from pellucid.kit.profile.measure import BUDGET
from pellucid.kit.profile.request import take_request
from pellucid.kit.profile.result import Advice, Profile
from pellucid.kit.profile.saved import FILE
from pellucid.kit.report.material import AGAINST, DOCTOR, MACHINE, TRACE, material_of
from pellucid.kit.report.page import page_of
from pellucid.kit.report.view import view_of
from pellucid.kit.runs.run import open_run, split_run
from pellucid.kit.runs.target import Request
from pellucid.kit.shown import Shown, plain
from pellucid.machine.model import to_text
from pellucid.trace.folder import write_json

REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class Reported(Shown):
    """page: the file. profile: its numbers, including `advice`; None for a run that was never profiled."""

    page: str
    folder: str
    profile: Profile | None

    @property
    def advice(self) -> tuple[Advice, ...]:
        return self.profile.advice if self.profile is not None else ()

    @property
    def good(self) -> bool:
        return self.profile is None or self.profile.good


def report(
    request: Request,
    folder: Path,
    against: Sequence[str] = (),
    budget: float = BUDGET,
    seconds: float = SECONDS,
    memory: int = 0,
    page: Path | None = None,
) -> Reported:
    """Write the page about a TARGET, and its data, into the run in a folder.

    A program is captured into a new run there and profiled; for a run, missing data is measured. against: backends, or
    `eager`, to compare it with. budget: seconds of calls. seconds, memory (bytes): limits of the process. page: the
    file to write; `report.html` of the run by default. Raises UserError for a target that does not exist, and for one
    that fails.
    """
    captured = split_run(request.target)
    if captured is not None and captured[1]:
        raise UserError("a report is about a whole run", hint=f"pellucid report {captured[0]}")
    complete = (folder / FILE).is_file() and all((folder / AGAINST.format(name)).is_file() for name in against)
    if not complete:
        refused, hint = f"{request.target} cannot be profiled", "see `pellucid check`"
        given = request, str(folder.absolute()), tuple(against), budget
        if captured is None:
            with Worker(memory) as worker:
                worker.ask(save_program, request, str(folder), seconds=seconds, refused=refused, hint=hint)
        with Worker(memory) as worker:  # a fresh process, because graphs are counted per process
            worker.ask(measure, *given, seconds=seconds + budget, refused=refused, hint=hint)
    return write_page(folder, page or folder / REPORT)


def write_page(folder: Path, page: Path) -> Reported:
    """Write the page of a run. Raises UserError for a folder that is not a run, and if `page` cannot be written."""
    material = material_of(folder)
    text = page_of(view_of(material))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {page}: {error}", hint="give a writable folder") from error
    return Reported(str(page), str(folder), material.profile)


# ------------------------------------------------------------------------------------------------ in the worker


def save_program(request: Request, folder: str) -> None:
    """Capture a program into a new run, with the compiled code of each of its graphs."""
    save_graphs(request, folder)
    for name in open_run(Path(folder), request.libraries).names:
        save_compiled(replace(request, target=f"{folder}:{name}"), intermediates=False, runs=False)


def measure(request: Request, folder: str, against: Sequence[str], budget: float) -> None:
    """Add to a run the profile of a request, comparisons with others, the machine's figures and process checks."""
    into = Path(folder)
    ours, *others = take_request(request, against, budget, str(into / TRACE))
    write_json(into / FILE, plain(ours))
    for theirs in others:
        write_json(into / AGAINST.format(theirs.backend), plain(compare(ours, theirs)))
    (into / MACHINE).write_text(to_text(known_machine()[0]), encoding="utf-8")
    write_json(into / DOCTOR, plain(process_checks()))
