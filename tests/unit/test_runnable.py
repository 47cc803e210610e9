"""What generated programs print: the comparing itself is tested with the programs."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from pellucid import runnable


def test_in_a_terminal_no_word_is_broken(monkeypatch):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(runnable, "_OUT", console)
    assert runnable._differs("output 0", torch.full((123, 456), 1.2345), torch.full((123, 456), 7.6543))
    lines = console.file.getvalue().splitlines()
    assert len(lines) > 1 and all(len(line) <= 80 for line in lines)
    assert "elements differ, by at most 6.42" in " ".join(" ".join(lines).split())


def test_in_a_pipe_a_line_is_whole(capsys):
    assert not runnable._differs("output 0", torch.ones(3), torch.ones(3))
    runnable._print("word " * 40)
    same, long = capsys.readouterr().out.splitlines()
    assert same == "output 0: float32 (3,), rms 1, the same as unedited" and len(long) > 80
