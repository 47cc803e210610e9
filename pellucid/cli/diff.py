"""`pellucid diff`: what changed between two runs."""

from __future__ import annotations

from pathlib import Path

import click

from pellucid.cli.target import end, example

_RUN = click.Path(path_type=Path, file_okay=False)


@click.command(epilog=example("pellucid diff run other_run"))
@click.argument("before", metavar="RUN", type=_RUN)
@click.argument("after", metavar="RUN", type=_RUN)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of text.")
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Which kernels, decisions, plans, numbers and times changed between two runs (of `pellucid capture`)?

    Exits with 1 when anything other than times changed.
    """
    from pellucid.kit.debug.diff import diff as run
    from pellucid.kit.runs.run import open_run
    from pellucid.kit.show import shown

    found = run(open_run(before), open_run(after))
    end(found, shown(found), as_json, found.good)
