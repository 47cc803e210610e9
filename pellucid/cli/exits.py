"""Exit codes.

`git bisect run` skips a commit at 125, takes any other code from 1 to 127 for a bad commit, and aborts from 128 on.
So an outcome that says nothing about the program must be neither 1 nor 2, Python's and Click's codes for their own
errors.
"""

from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit status means, to a shell and to `git bisect run`."""

    GOOD = 0
    BAD = 1
    SKIP = 125
    FAILED = 255
