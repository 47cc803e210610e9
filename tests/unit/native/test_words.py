"""The numbers that Python and the native runtime share."""

from __future__ import annotations

import pytest

from pellucid.errors import InternalError
from pellucid.native import loader
from pellucid.native.words import words_header


def test_enumerators_are_named_as_in_cpp() -> None:
    assert "enum class Returned : int64_t { kTensor = 0, kTensorList = 1, kOther = 2 };" in words_header()


def test_another_numbering_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "words_header", lambda: words_header() + "// changed\n")
    with pytest.raises(InternalError, match=r"words\.h is not what native/words\.py says"):
        loader._open()
