"""`pellucid run`: run a command in the recommended environment."""

from __future__ import annotations

import click

from pellucid.cli.target import end, example
from pellucid.cli.terminal import Count, err
from pellucid.printing import show

STDERR = 2  # a file descriptor


@click.command(
    epilog=example("pellucid run -- python train.py", "pellucid run --compare 5 -- python infer.py"),
    context_settings={"allow_interspersed_args": False},
)
@click.option("--pin", is_flag=True, help="Bind each thread to a core: for a machine that nothing else uses.")
@click.option("--compare", "pairs", type=Count(min=1), metavar="N", help="Time COMMAND N times with and without.")
@click.option("--dry-run", is_flag=True, help="Only show what would be set.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="With --compare or --dry-run: print JSON on stdout; the output of COMMAND goes to stderr.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], pin: bool, pairs: int | None, dry_run: bool, as_json: bool) -> None:
    """Run COMMAND in the environment that `pellucid doctor` recommends for this machine.

    Prints what is set and why; variables that you have set yourself stay. COMMAND replaces this process, so the exit
    code is that of COMMAND.
    """
    from pellucid.kit.debug.launch import compare, plan, replace_process
    from pellucid.kit.show import shown

    launch = plan(command, pin)
    if pairs is not None:
        launch = compare(launch, pairs, STDERR if as_json else None)
    if dry_run or pairs is not None:
        end(launch, shown(launch), as_json, launch.good)
    show(err, shown(launch))
    replace_process(launch)
