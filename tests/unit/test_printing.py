"""What commands print: no name, path or number is broken, in a terminal or in a pipe."""

import io
import os

import pytest
from rich.console import Console, Group

from pellucid.printing import Table, code, place, plain, relative, sentence, shortened, show

LONG = "/usr/lib/python3/site-packages/transformers/models/mobilebert/modeling_mobilebert.py"


def terminal(what, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)
    show(console, what)
    return console.file.getvalue().splitlines()


def test_a_sentence_wraps_between_words_and_never_in_one():
    word = "aten::a_name_that_is_longer_than_the_terminal"
    lines = terminal(sentence(f"one two three {word} four five", hang=2), 16)
    assert lines == ["one two three", f"  {word}", "  four five"]


def test_a_bare_text_is_a_sentence():
    assert terminal("each graph, with inputs of it", 24) == ["each graph, with inputs", "of it"]


def test_an_index_or_a_shape_is_not_broken():
    assert terminal(sentence("differs, most at [1130, 2]: 7", hang=2), 24) == ["differs, most at", "  [1130, 2]: 7"]
    assert terminal(sentence("of float32[8390, 8]: all [of it]"), 28) == ["of float32[8390, 8]: all [of", "it]"]


def test_a_pipe_gets_one_line_whatever_the_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = " ".join(["word"] * 60)
    assert plain(sentence(words)) == words
    assert plain(Table(("n", "what"), [("1", words)])) == f"n  what\n1  {words}"


def test_a_path_is_shortened_in_the_middle_in_a_terminal_and_whole_in_a_pipe():
    (line,) = terminal(place(f"{LONG}:1038 (encoder.0)", "at "), 60)
    assert line == "at /…/mobilebert/modeling_mobilebert.py:1038 (encoder.0)"
    assert plain(place(f"{LONG}:1038", "at ")) == f"at {LONG}:1038"


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (11, "a/b/c/d.py"),
        (10, "a/b/c/d.py"),
        (9, "a/…/d.py"),
        (8, "a/…/d.py"),
        (7, "…/d.py"),
        (5, "d….py"),
        (4, "d…py"),
    ],
)
def test_the_ends_of_a_path_are_kept_longest(width, text):
    assert shortened("a/b/c/d.py", width) == text


def test_a_path_below_the_working_directory_is_relative():
    here = os.getcwd()
    assert relative(f"{here}/a/b.py") == "a/b.py"
    assert relative("/elsewhere/b.py") == "/elsewhere/b.py" and relative("a/b.py") == "a/b.py" and relative("") == ""


def test_the_last_column_of_a_table_takes_what_room_is_left_and_the_others_are_whole():
    table = Table(("n", "kernel", "why"), [("12", "k_add", sentence("one two three " * 4)), ("3", "k", code("x = y"))])
    assert terminal(table, 50) == [
        "n   kernel  why",
        "12  k_add   one two three one two three one two",
        "            three one two three",
        "3   k       x = y",
    ]


def test_code_is_printed_as_it_is():
    text = "auto v = " + "x + " * 40 + "y;"
    assert terminal(Group(code(text)), 30) == plain(code(text)).splitlines() == [text]


def test_no_line_ends_in_blanks():
    table = Table(("a", "b", ""), [("1", "", ""), ("1", "longer", "")], frozenset((0, 1)))
    assert all(line == line.rstrip() for line in (*terminal(table), *plain(table).splitlines()))
