"""Golden files: `pytest tests/golden --bless` rewrites those that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite the golden files that differ")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("codegen/softmax.cpp", text)` compares a text with a file beside the tests."""
    bless = request.config.getoption("--bless", default=False)

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / name
        if bless:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"there is no {path}; make it with: pytest tests/golden --bless"
        assert text == path.read_text(), f"{path} differs; if that is right: pytest tests/golden --bless"

    return check
