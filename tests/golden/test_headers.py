"""The headers that are made of Python: the numbers that it shares with the native runtime and with kernels."""

from __future__ import annotations

from collections.abc import Callable

from pellucid.machine.kernels import sizes_text
from pellucid.native.sources import SOURCES
from pellucid.native.words import words_header


def test_words(golden: Callable[[str, str], None]) -> None:
    golden(str(SOURCES / "words.h"), words_header())


def test_sizes(golden: Callable[[str, str], None]) -> None:
    golden(str(SOURCES / "sizes.h"), sizes_text())
