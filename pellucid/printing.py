"""What commands print, for a terminal and for a pipe: sentences, code, paths, and tables of them.

In a terminal, sentences wrap between words, and a path that is too long is shortened in the middle. A name, a path, an
index or a line of code is never broken, because half of it looks like another one. In a pipe nothing is
wrapped or shortened.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

_WORD = re.compile(r"\s*(?:\[[-\d, ]*\]|\S)+\s*")  # an index or a shape, `[1130, 2]`, is one
_MIN_WIDTH = 32  # columns for sentences: in a narrower terminal, the terminal breaks the lines


@dataclass(frozen=True, slots=True)
class Sentence:
    """Wraps between words; what follows the first line is indented by `hang` columns."""

    text: Text
    hang: int = 0

    def lines(self, width: int | None) -> list[Text]:
        if width is None:
            return [self.text]
        lines, indent = [], Text(" " * self.hang)
        for part in self.text.split("\n", allow_blank=True):
            for piece in part.divide(_breaks(part.plain, width, self.hang)):
                piece.rstrip()
                lines.append(indent + piece if lines else piece)
        return lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(_whole, self.lines(_width(options)))


@dataclass(frozen=True, slots=True)
class Code:
    """Lines of code, or a name: printed as they are."""

    text: Text

    def lines(self, width: int | None) -> list[Text]:
        return list(self.text.split("\n", allow_blank=True))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(_whole, self.lines(_width(options)))


@dataclass(frozen=True, slots=True)
class Place:
    """A path or a long name, with text before it and after it (`:12 (blocks.1)`)."""

    path: str
    before: str = ""
    after: str = ""

    def lines(self, width: int | None) -> list[Text]:
        around = cell_len(self.before) + cell_len(self.after)
        path = self.path if width is None else shortened(self.path, width - around)
        return [Text(f"{self.before}{path}{self.after}")]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(_whole, self.lines(_width(options)))


Part: TypeAlias = Sentence | Code | Place
Cell: TypeAlias = "str | Text | Part | Sequence[Part]"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in aligned columns. The cells of the last column may have several lines, and take the remaining width.

    headings: empty for none. right: numbers of the columns that are aligned to the right; the last cannot be.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: frozenset[int] = frozenset()
    gap: str = "  "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = _width(options)
        heads = [[Text(name, style="dim") for name in self.headings]] if self.headings else []
        rows = [*heads, *self.rows]
        grid = [[_text(cell) for cell in row[:-1]] for row in rows]
        widths = [max(cell_len(cell.plain) for cell in column) for column in zip(*grid, strict=True)]
        blank = [Text(" " * size) for size in widths]
        remaining = None if width is None else max(_MIN_WIDTH, width - sum(widths) - len(self.gap) * len(widths))
        for cells, row in zip(grid, rows, strict=True):
            first, *more = [line for part in _parts(row[-1]) for line in part.lines(remaining)] or [Text()]
            yield _whole(Text(self.gap).join((*self._aligned(cells, widths), first)))
            yield from (_whole(Text(self.gap).join((*blank, line))) for line in more)

    def _aligned(self, cells: Sequence[Text], widths: Sequence[int]) -> list[Text]:
        aligned: list[Text] = []
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            space = Text(" " * (width - cell_len(cell.plain)))
            aligned.append(space + cell if number in self.right else cell + space)
        return aligned


def sentence(*parts: str | tuple[str, str], hang: int = 0) -> Sentence:
    """A sentence of texts and (text, style)."""
    return Sentence(Text.assemble(*parts), hang)


def code(text: str, indent: str = "") -> Code:
    """Lines that are printed as they are, indented."""
    return Code(Text("\n".join(f"{indent}{line}" for line in text.splitlines())))


def place(text: str, before: str = "") -> Place:
    """A location in a program, `file:line (module)`, its file relative to the working directory."""
    found = re.match(r"(?P<path>.*?)(?P<after>:\d+(?: \(.*\))?)?$", text, re.DOTALL)
    assert found is not None
    return Place(relative(found["path"]), before, found["after"] or "")


def name(text: str, before: str = "", after: str = "") -> Place:
    """A name that may be too long for a terminal."""
    return Place(text, before, after)


def relative(path: str) -> str:
    """A path relative to the working directory, if it is below that."""
    inside = os.path.isabs(path) and os.path.relpath(path)
    return inside if inside and not inside.startswith(os.pardir) else path


def shortened(path: str, width: int) -> str:
    """A path or name of at most `width` columns: directories in the middle are replaced by `…`, or else letters."""
    if cell_len(path) <= width:
        return path
    first, *middle, last = path.split(os.sep) if os.sep in path.strip(os.sep) else ["", path]
    head = f"{first}{os.sep}" if first else os.sep if path.startswith(os.sep) else ""
    while middle:
        middle.pop(0)
        found = head + os.sep.join(("…", *middle, last))
        if cell_len(found) <= width:
            return found
    if cell_len(last) + 2 <= width:
        return f"…{os.sep}{last}"
    front = max(0, width - 1) // 3
    return f"{last[:front]}…{last[len(last) - max(1, width - 1 - front) :]}"


def plain(what: RenderableType) -> str:
    """The text that is printed to a pipe, without the last line break."""
    file = io.StringIO()
    show(Console(file=file, force_terminal=False, color_system=None, highlight=False), what)
    return file.getvalue().removesuffix("\n")


def show(console: Console, what: RenderableType, style: str | None = None) -> None:
    """Print to a console, which is a terminal or a pipe."""
    what = sentence(what) if isinstance(what, str) else what
    console.print(what, style=style, crop=False, soft_wrap=not console.is_terminal)


def _width(options: ConsoleOptions) -> int | None:
    """The width of a terminal; None in a pipe."""
    return None if options.no_wrap else options.max_width


def _breaks(text: str, width: int, hang: int) -> list[int]:
    """The offsets at which to break a text so that its lines fit, if its words do."""
    breaks: list[int] = []
    column = 0
    for word in _WORD.finditer(text):
        length = cell_len(word[0].rstrip())
        if column and column + length > width:
            breaks.append(word.start())
            column = hang
        column += cell_len(word[0])
    return breaks


def _text(cell: Cell) -> Text:
    return Text("\n").join(line for part in _parts(cell) for line in part.lines(None))


def _parts(cell: Cell) -> Iterable[Part]:
    if isinstance(cell, str | Text):
        return (Sentence(Text(cell) if isinstance(cell, str) else cell),)
    return (cell,) if isinstance(cell, Sentence | Code | Place) else cell


def _whole(line: Text) -> Text:
    """A line that is printed as it is."""
    line.rstrip()
    line.no_wrap, line.overflow = True, "ignore"
    return line
