"""`pellucid cache`: what compiled graphs leave on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pellucid.cli.target import end, example
from pellucid.cli.terminal import AGE, OUTPUT_FILE, SIZE, Commands

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of text.")


@click.group(
    cls=Commands,
    epilog=example("pellucid cache list", "pellucid cache export warm.tar.gz", "pellucid cache trim --older 30d"),
)
def cache() -> None:
    """What do compiled graphs leave on disk, and is it whole? Lists, checks, trims it, and carries it elsewhere.

    The store is $PELLUCID_CACHE_DIR, or else lies in the user's cache folder.
    """


@cache.command("list")
@_json
def list_command(as_json: bool) -> None:
    """Which graphs and kernels are there, of which size and age, and when were they used last?"""
    from pellucid.kit.debug.cache import listed

    _finish(listed(), as_json)


@cache.command()
@_json
def size(as_json: bool) -> None:
    """How much is there of what?"""
    from pellucid.kit.debug.cache import sizes

    _finish(sizes(), as_json)


@cache.command()
@click.option("--remove", is_flag=True, help="Remove what is bad; it counts as missing anyway.")
@_json
def verify(remove: bool, as_json: bool) -> None:
    """Is each entry whole, and could nobody else have written it? All of them are read.

    What was built for another processor, PyTorch or compiler is told, with the difference. Exits with 1 if an entry
    is damaged, half-written or not to be trusted.
    """
    from pellucid.kit.debug.cache import verified

    _finish(verified(remove), as_json)


@cache.command(epilog=example("pellucid cache export warm.tar.gz"))
@click.argument("file", type=OUTPUT_FILE)
@_json
def export(file: Path, as_json: bool) -> None:
    """Write what the store has for this machine to FILE, an archive."""
    from pellucid.kit.debug.cache import exported

    _finish(exported(file), as_json)


@cache.command("import", epilog=example("pellucid cache import warm.tar.gz"))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@_json
def import_command(file: Path, as_json: bool) -> None:
    """Put FILE, an archive that `pellucid cache export` wrote, into the store.

    All of it is checked first. It holds code that runs: take it from nobody whose programs you would not run. What was
    built for another processor, PyTorch or compiler is refused.
    """
    from pellucid.kit.debug.cache import imported

    _finish(imported(file), as_json)


@cache.command(epilog=example("pellucid cache trim --older 30d", "pellucid cache trim --size 2GB"))
@click.option("--older", type=AGE, help="Remove what was not used for so long: 30d, 12h, 90min.")
@click.option("--size", "nbytes", type=SIZE, help="Then the least recently used, until so much is left: 500MB, 2GB.")
@click.option("--dry-run", "tried", is_flag=True, help="Only say what would go.")
@_json
def trim(older: float | None, nbytes: int | None, tried: bool, as_json: bool) -> None:
    """Remove what has not been used for long, or what is too much. Other processes may go on meanwhile."""
    from pellucid.kit.debug.cache import trimmed

    if older is None and nbytes is None:
        raise click.UsageError("say what is to go: --older AGE, --size SIZE or both")
    _finish(trimmed(older, nbytes, tried), as_json)


def _finish(found: Any, as_json: bool) -> None:
    from pellucid.kit.show import shown

    end(found, shown(found), as_json, found.good)
