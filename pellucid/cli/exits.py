"""Exit codes.

`git bisect run` takes 125 for a commit to skip and all else up to 127 for a bad one; from 128 on it gives up, and
blames no commit. So what says nothing of the program must be neither 1 nor 2, Python's and Click's codes for their
own errors.
"""

from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit status means, to a shell and to `git bisect run`."""

    GOOD = 0
    BAD = 1
    SKIP = 125
    FAILED = 255
