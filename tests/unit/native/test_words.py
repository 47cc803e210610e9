"""The numbers that Python and the native runtime share."""

from __future__ import annotations

import pytest

from pellucid.native import loader
from pellucid.native.sources import SOURCES
from pellucid.native.words import words_header


def test_enumerators_are_named_as_in_cpp() -> None:
    assert "enum class Returned : int64_t { kTensor = 0, kTensorList = 1, kOther = 2 };" in words_header()


def test_another_numbering_is_another_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_FILES", ("runtime.cpp",))
    named: list[str] = []

    def file(_: object, name: str) -> object:
        named.append(name)
        return SOURCES

    monkeypatch.setattr("pellucid.native.store.KernelStore.file", file)
    loader._build()
    monkeypatch.setattr(loader, "words_header", lambda: words_header() + "// changed\n")
    loader._build()
    first, second = named
    assert first != second
