"""Exit codes."""

from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit status means, to a shell and to `git bisect run`."""

    GOOD = 0
    BAD = 1
    FAILED = 2
    SKIP = 125
