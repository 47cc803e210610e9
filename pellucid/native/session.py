"""The native code that this process has loaded, until its end, because compiled programs may call it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.native.locks import Lock


@dataclass(slots=True)
class Session:
    """libraries: by path. addresses: of kernels, by store, name and hash of their text. lock: held while the runtime is
    built and loaded. borrowed: objects that the runtime has pointers to.
    """

    libraries: dict[Path, ctypes.CDLL] = field(default_factory=dict)
    addresses: dict[tuple[str, str, str], int] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
    borrowed: list[object] = field(default_factory=list)


SESSION = Session()
