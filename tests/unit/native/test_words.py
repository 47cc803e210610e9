"""The numbers that Python and the native runtime share."""

from __future__ import annotations

import pytest

from pellucid.errors import InternalError
from pellucid.native import loader
from pellucid.native.words import words_header


def test_enumerators_are_named_as_in_cpp() -> None:
    assert "enum class Returned : int64_t { kTensor = 0, kTensorList = 1, kOther = 2 };" in words_header()


@pytest.mark.parametrize("header", ["words", "sizes"])
def test_other_numbers_than_those_of_the_header_are_refused(monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    function = f"{header}_{'header' if header == 'words' else 'text'}"
    made = getattr(loader, function)()
    monkeypatch.setattr(loader, function, lambda: made + "// changed\n")
    with pytest.raises(InternalError, match=rf"{header}\.h is outdated"):
        loader._open()
