"""`pellucid capture`: save a program's graphs and inputs in a folder."""

from __future__ import annotations

import click

from pellucid.cli.target import Target, target_command


@target_command("pellucid capture model.py:make -o run")
@click.option("--intermediates", is_flag=True, help="Save every intermediate result that compiled code stores.")
def capture(target: Target, intermediates: bool) -> None:
    """Save TARGET's graphs, their inputs and what the backend compiles them to into a run (-o).

    A run needs neither the program nor its modules: every command takes it as its TARGET, here or on another machine.
    Exits with 1 when compiled code is wrong or fails.
    """
    from pellucid.kit.debug.capture import capture as run

    request = target.request()
    folder, limits = target.run_of(request.target), {"seconds": target.seconds, "memory": target.memory}
    target.finish(run(request, folder, intermediates=intermediates, **limits))
