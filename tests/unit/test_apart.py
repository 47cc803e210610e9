"""Work in a fresh process: what it says, returns and raises, and how it ends. Imports no torch, to be quick."""

from __future__ import annotations

import os
import signal
import time

import pytest

from pellucid.errors import InternalError, UserError
from pellucid.kit.process.apart import Apart, Died, say


def apart(function, *args, seconds=60.0, hear=lambda said: None):
    return Apart(f"tests.unit.test_apart:{function.__name__}", *args).result(hear, seconds)


def counting(count):
    for number in range(count):
        say(number)
    return {"sum": sum(range(count))}


def refusing():
    raise UserError("it is not there", hint="look elsewhere", context={"where": 3})


def failing():
    raise ZeroDivisionError("here")


def sleeping():
    time.sleep(60)


def ending():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_answers_and_tells_how_it_gets_on():
    heard = []
    assert apart(counting, 4, hear=heard.append) == {"sum": 6} and heard == [0, 1, 2, 3]


def test_what_a_process_raises():
    with pytest.raises(UserError, match="it is not there") as refused:
        apart(refusing)
    assert refused.value.hint == "look elsewhere" and refused.value.context == {"where": "3"}
    with pytest.raises(InternalError, match="ZeroDivisionError: here"):
        apart(failing)
    with pytest.raises(Died, match="SIGKILL"):
        apart(ending)
    with pytest.raises(Died, match=r"did not end in 0\.2 s"):
        apart(sleeping, seconds=0.2)
