"""What holds for all tests that compile."""

from __future__ import annotations

import pytest

from pellucid import backend


@pytest.fixture(autouse=True)
def no_earlier_compilations() -> None:
    """Tests count the graphs that they compile; `last_compilations` stops growing at its limit."""
    backend._compilations.clear()
