"""The numbers that Python shares with the native runtime, as C++."""

from __future__ import annotations

from collections.abc import Callable

from pellucid.native.runtime_source import SOURCES
from pellucid.native.words import words_header


def test_words(golden: Callable[[str, str], None]) -> None:
    golden(str(SOURCES / "words.h"), words_header())
