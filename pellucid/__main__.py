"""`python -m pellucid`: the command."""

from pellucid.cli import main

main(prog_name="pellucid")
