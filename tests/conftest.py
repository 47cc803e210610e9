"""What holds for all tests."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.commit import other_thirds, third_of_commit

# Kernels are the same on every run, whatever was measured on the machine.
os.environ.setdefault("PELLUCID_MACHINE", "reference")

# Tests look at what the compiler does, some with a part of it replaced: so all is compiled, unless a run is asked to
# start what an earlier one compiled.
os.environ.setdefault("PELLUCID_REUSE", "0")

# A runner that starts the tests in the background leaves Ctrl-C ignored, for the processes that tests start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "which of the tests marked `sampled` run: all of them, or a third, another one for each commit"
    parser.addoption("--cases", choices=("all", "third"), default="all", help=about)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("cases") == "third":
        sampled = (item.nodeid for item in items if item.get_closest_marker("sampled"))
        others = other_thirds(sampled, third_of_commit())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` measures: no other process of these tests runs one meanwhile.

    It locks the room, which all others share. Each passes the same door, so that one who waits for an empty room
    keeps others from entering.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    shared = Path(item.config.getoption("basetemp")).parent  # by all processes of this run
    with (shared / "room").open("w") as room:
        with (shared / "door").open("w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """For tests of many shapes, whose time is the compiler's: with -O1 it takes half of that.

    Vector code is written out either way. What users get, -O3, is what all other tests run.
    """
    from pellucid.native.toolchain import detect

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELLUCID_CXXFLAGS", "-O1")
        detect.cache_clear()
        yield
    detect.cache_clear()
