"""`pellucid cache`: the on-disk store of compiled graphs."""

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
    """List, verify, trim, export and import the store of compiled graphs and kernels.

    The store is $PELLUCID_CACHE_DIR, by default a folder in the user's cache directory.
    """


@cache.command("list")
@_json
def list_command(as_json: bool) -> None:
    """List the graphs and kernels with their size, age and last use."""
    from pellucid.kit.debug.cache import listed

    _finish(listed(), as_json)


@cache.command()
@_json
def size(as_json: bool) -> None:
    """Show the number and size of entries by kind."""
    from pellucid.kit.debug.cache import sizes

    _finish(sizes(), as_json)


@cache.command()
@click.option("--remove", is_flag=True, help="Remove bad entries; the compiler ignores them anyway.")
@_json
def verify(remove: bool, as_json: bool) -> None:
    """Read every entry, and check that it is intact and that no other user could have written it.

    Entries built for another processor, PyTorch or compiler are reported with the difference. Exits with 1 if an entry
    is damaged, incomplete or untrusted.
    """
    from pellucid.kit.debug.cache import verified

    _finish(verified(remove), as_json)


@cache.command(epilog=example("pellucid cache export warm.tar.gz"))
@click.argument("file", type=OUTPUT_FILE)
@_json
def export(file: Path, as_json: bool) -> None:
    """Write the entries for this machine to FILE, an archive."""
    from pellucid.kit.debug.cache import exported

    _finish(exported(file), as_json)


@cache.command("import", epilog=example("pellucid cache import warm.tar.gz"))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@_json
def import_command(file: Path, as_json: bool) -> None:
    """Add FILE, an archive that `pellucid cache export` wrote, to the store.

    All of it is checked first. It contains executable code: import it only from sources whose programs you would run.
    Entries built for another processor, PyTorch or compiler are rejected.
    """
    from pellucid.kit.debug.cache import imported

    _finish(imported(file), as_json)


@cache.command(epilog=example("pellucid cache trim --older 30d", "pellucid cache trim --size 2GB"))
@click.option("--older", type=AGE, help="Remove entries unused for this long: 30d, 12h, 90min.")
@click.option("--size", "nbytes", type=SIZE, help="Then remove the least recently used, down to this size: 500MB, 2GB.")
@click.option("--dry-run", "tried", is_flag=True, help="Only show what would be removed.")
@_json
def trim(older: float | None, nbytes: int | None, tried: bool, as_json: bool) -> None:
    """Remove entries that are old, or that exceed a total size. Other processes may use the store meanwhile."""
    from pellucid.kit.debug.cache import trimmed

    if older is None and nbytes is None:
        raise click.UsageError("specify what to remove: --older AGE, --size SIZE or both")
    _finish(trimmed(older, nbytes, tried), as_json)


def _finish(found: Any, as_json: bool) -> None:
    from pellucid.kit.show import shown

    end(found, shown(found), as_json, found.good)
