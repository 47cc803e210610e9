"""The header of all kernels, as one text."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path

from pellucid.machine.kernels import sizes_text
from pellucid.native.runtime_source import SOURCES


def prelude_text(directory: Path) -> str:
    """The header of all kernels, `prelude.h`, with the headers that it includes in their places, `sizes.h` made anew.

    It is one text because a single header is precompiled and kept with the kernels.
    """
    text = (directory / "prelude.h").read_text(encoding="utf-8")
    text = text.replace('#include "sizes.h"', sizes_text())
    return re.sub(
        r'^#include "([\w/]+\.h)"$',
        lambda found: (directory / found[1]).read_text(encoding="utf-8"),
        text,
        flags=re.MULTILINE,
    )


@lru_cache(maxsize=1)
def prelude_hash() -> str:
    """Identity of the header that every kernel includes."""
    return hashlib.sha256(prelude_text(SOURCES).encode()).hexdigest()[:12]
