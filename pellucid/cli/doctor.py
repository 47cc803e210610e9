"""`pellucid doctor`: check the machine, the toolchain and the process, each with a verdict and a remedy."""

from __future__ import annotations

from pathlib import Path

import click

from pellucid.cli.target import end, example
from pellucid.cli.terminal import OUTPUT_FILE


@click.command(epilog=example("pellucid doctor --remeasure -o machine.json"))
@click.option("--remeasure", is_flag=True, help="Measure the machine again: about two seconds.")
@click.option("-o", "file", metavar="FILE", type=OUTPUT_FILE, help="Write the machine's figures to FILE too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of text.")
def doctor(remeasure: bool, file: Path | None, as_json: bool) -> None:
    """What can this machine do, and what keeps it from doing so?

    The machine is measured at the first call, and the compiler uses the saved figures from then on. Use FILE as
    PELLUCID_MACHINE, here or on another machine. Exits with 1 if a check fails.
    """
    from pellucid.kit.debug.doctor import doctor as run
    from pellucid.kit.debug.doctor import write_machine
    from pellucid.kit.show import shown

    found = run(remeasure)
    if file is not None:
        write_machine(found, file)
    end(found, shown(found), as_json, found.good)
