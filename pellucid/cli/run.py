"""`pellucid run`: a command in the recommended environment."""

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
@click.option("--compare", "pairs", type=Count(min=1), metavar="N", help="Time it N times with and without.")
@click.option("--dry-run", is_flag=True, help="Only say what would be set.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="With --compare or --dry-run: print JSON on stdout; what COMMAND prints goes to stderr.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], pin: bool, pairs: int | None, dry_run: bool, as_json: bool) -> None:
    """Run COMMAND in the environment that `pellucid doctor` recommends for this machine.

    Says what is set and why; what you have set yourself stays. The command takes the place of this process, so its exit
    code is that of the command.
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
