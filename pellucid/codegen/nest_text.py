"""The text form of loop nests: printed, and read back.

A line of the kernel is printed in full where it is computed, as in `ir/printer.py`; elsewhere by its name:

    nest k(p0: f32[24576], p1: f32[24576]) {
      axes i0: 48, i1: 512
      lanes 64 of i1
      parallel i0 {
        start v1
        vector i1 {
          v0: f32 = load p0[512*i0 + i1]
          v1: f32 = max v0 over i1
        }
        finish v1
        vector i1 {
          v0: f32 = load p0[512*i0 + i1]
          v2: f32 = sub v0, v1
          st0: f32 = store p1[512*i0 + i1], v2
        }
      }
    }

The grammar, with the rules of `ir/parser.py`:

    nest    = "nest" name ["<" names ">"] "(" [param ","]* ")" "{" ["axes" axis ("," axis)*] [lanes] item* "}"
    lanes   = "lanes" number "of" name
    item    = "parallel" [counter ("," counter)*] "{" item* "}" | loop | call | line ["once" names | "so" "far"] | step
    counter = name [part "by" expr]
    loop    = "for" name ["in" part] "{" item* "}" | "vector" name ["in" part] "{" item* "}"
            | "blocks" name "by" number "{" item* "}"
    part    = "lo" "." "." "hi" | "start" "." "." "stop" | "from" "." "." "to"
    call    = "call" name name ["into" "block" "[" number "]"] "{" line* "}"
    step    = ("start" | "close" | "finish" | "scratch" | "keep" | "recall") name
            | "start" name "in" "blocks" ["of" number "vectors"]
            | ("read" | "open" | "write") "square" name "along" name

A line that reduces adds to its accumulator; with `so far` its value is that of the accumulator at this point. Indices
into a block name the ends of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from typing_extensions import assert_never

from pellucid.codegen.nest import (
    BLOCK,
    Accumulate,
    Advance,
    Call,
    CloseBlock,
    Counter,
    Define,
    FillTile,
    Finish,
    Item,
    Keep,
    Kind,
    Loop,
    Nest,
    Parallel,
    Part,
    Put,
    Recall,
    Scratch,
    Start,
    StartBlocks,
    StartTile,
    WriteTile,
    steps_of,
)
from pellucid.ir.index import ONE, Expr, text
from pellucid.ir.nodes import Line, Reduce, Store
from pellucid.ir.parser import Parser
from pellucid.ir.printer import print_head, print_line, print_origin, symbols_of, with_comments

_NAMED = {"start": Start, "close": CloseBlock, "finish": Finish, "scratch": Scratch, "keep": Keep, "recall": Recall}
_SQUARES = {"read": FillTile, "open": StartTile, "write": WriteTile}
_WORDS = {step: word for word, step in [*_NAMED.items(), *_SQUARES.items()]}


def print_nest(nest: Nest, origins: bool = True) -> str:
    """`nest` as text, without a newline at the end."""
    lines = [line for step in steps_of(nest.body) for line in (step.lines if isinstance(step, Call) else [step.line])]
    symbols = symbols_of(nest.params, nest.space, lines)
    lanes = [f"  lanes {nest.width} of {nest.vector}"] if nest.vector else []
    items = [*_items(nest.body, "  ")]
    comments = [print_origin(line.origin) if line and origins else "" for _, line in items]
    head = print_head("nest", nest.name, symbols, nest.params, nest.space)
    return "\n".join([*head, *lanes, *with_comments([text for text, _ in items], comments), "}"])


def _items(items: Iterable[Item], indent: str) -> Iterator[tuple[str, Line | None]]:
    """Each line of text, with the line of the kernel that it shows."""
    for item in items:
        match item:
            case Parallel(counters, body):
                opened = " ".join(["parallel", ", ".join(map(_counter, counters))]).rstrip()
                yield from _enclosed(opened, _items(body, indent + "  "), indent)
            case Loop(kind, axis, body, step, part):
                cut = f" by {step}" if kind is Kind.BLOCKS else f" in {part.value}" if part.value else ""
                yield from _enclosed(f"{kind.value} {axis}{cut}", _items(body, indent + "  "), indent)
            case Call(function, line, lines, size):
                memory = f" into {BLOCK}[{size}]" if size else ""
                inside = ((f"{indent}  {print_line(each)}", each) for each in lines)
                yield from _enclosed(f"call {function} {line.out}{memory}", inside, indent)
            case Define(line) | Accumulate(line):
                yield indent + print_line(line), line
            case Advance(line):
                yield f"{indent}{print_line(line)} so far", line
            case Put(line, once):
                yield indent + print_line(line) + (f" once {', '.join(once)}" if once else ""), line
            case StartBlocks(line, abreast):
                yield f"{indent}start {line.out} in blocks" + (f" of {abreast} vectors" if abreast else ""), None
            case FillTile(line, axis) | StartTile(line, axis) | WriteTile(line, axis):
                yield f"{indent}{_WORDS[type(item)]} square {line.out} along {axis}", None
            case Start(line) | CloseBlock(line) | Finish(line) | Scratch(line) | Keep(line) | Recall(line):
                yield f"{indent}{_WORDS[type(item)]} {line.out}", None
            case _:
                assert_never(item)


def _counter(counter: Counter) -> str:
    piece = f" {counter.part.value} by {text(counter.step)}" if counter.part is not Part.WHOLE else ""
    return counter.axis + piece


def _enclosed(opened: str, inside: Iterable[tuple[str, Line | None]], indent: str) -> Iterator[tuple[str, Line | None]]:
    yield f"{indent}{opened} {{", None
    yield from inside
    yield f"{indent}}}", None


def parse_nest(text: str) -> Nest:
    """The nest that `print_nest` wrote, without origins."""
    return _NestParser(text).whole(_NestParser.nest)


class _NestParser(Parser):
    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.lines: dict[str, Line] = {}
        self.ranges: dict[str, Expr] = {}
        self.width = 1

    def nest(self) -> Nest:
        name, params, space = self.head("nest")
        self.ranges = {axis.name: axis.extent for axis in space}
        self.axes |= {name for part in Part for name in part.ends}
        vector = self.lanes() if self.accept("lanes") else None
        self.lines = self.read_ahead()
        return Nest(name, params, space, vector, self.width, self.items())

    def lanes(self) -> str:
        """The axis of vectors."""
        self.width = self.count()
        self.expect("of")
        vector = self.one_of(self.ranges, "axis")
        self.end_statement()
        return vector

    def read_ahead(self) -> dict[str, Line]:
        """The lines of the text by name; of a line in a call and after it the latter, to which other steps refer."""
        here, lines = self.position, dict[str, Line]()
        for position in range(here, len(self.tokens)):
            self.position = position
            if self.begins_line():
                line = self.line()
                lines[line.out] = line
        self.position = here
        return lines

    def begins_line(self) -> bool:
        following = self.tokens[min(self.position + 1, len(self.tokens) - 1)]
        return self.token.kind == "name" and following.text == ":"

    def count(self) -> int:
        token = self.expect_kind("number", "a whole number")
        if not token.text.isdigit():
            raise self.error("expected a whole number", token)
        return int(token.text)

    def items(self) -> tuple[Item, ...]:
        """The items up to a closing brace."""
        items: list[Item] = []
        while not self.accept("}"):
            items.append(self.item())
            self.end_statement()
        return tuple(items)

    def body(self) -> tuple[Item, ...]:
        self.expect("{")
        self.end_statement()
        return self.items()

    def item(self) -> Item:
        if self.begins_line():
            return self.computed()
        word = self.one_of([*_NAMED, *_SQUARES, "parallel", "call", *(kind.value for kind in Kind)], "step")
        match word:
            case "parallel":
                counters = () if self.at("{") else self.separated(self.counter)
                return Parallel(counters, self.body())
            case "call":
                return self.call()
            case _ if word in _SQUARES:
                self.expect("square")
                line = self.known_line()
                self.expect("along")
                return _SQUARES[word](line, self.one_of(self.ranges, "axis"))
            case _ if word in _NAMED:
                line = self.known_line()
                return self.blocks_of(line) if word == "start" and self.accept("in") else _NAMED[word](line)
            case _:
                return self.loop(Kind(word))

    def computed(self) -> Item:
        line = self.line()
        match line.rhs:
            case Reduce():
                if not self.accept("so"):
                    return Accumulate(line)
                self.expect("far")
                return Advance(line)
            case Store():
                axes = self.separated(lambda: self.one_of(self.ranges, "axis")) if self.accept("once") else ()
                return Put(line, axes)
            case _:
                return Define(line)

    def known_line(self) -> Line:
        return self.lines[self.one_of(self.lines, "line")]

    def blocks_of(self, line: Line) -> StartBlocks:
        self.expect("blocks")
        if not self.accept("of"):
            return StartBlocks(line, 0)
        abreast = self.count()
        self.expect("vectors")
        return StartBlocks(line, abreast)

    def counter(self) -> Counter:
        axis = self.one_of(self.ranges, "axis")
        part = self.part()
        step = self.expr() if part is not Part.WHOLE and self.expect("by") else ONE
        return Counter(axis, self.ranges[axis], step, part)

    def part(self) -> Part:
        for part in Part:
            if part.first and self.accept(part.first):
                self.expect(".")
                self.expect(".")
                self.expect(part.last)
                return part
        return Part.WHOLE

    def loop(self, kind: Kind) -> Loop:
        axis = self.one_of(self.ranges, "axis")
        step = {Kind.SERIAL: 1, Kind.VECTOR: self.width}.get(kind, 0)
        part = Part.WHOLE
        if kind is Kind.BLOCKS:
            self.expect("by")
            step = self.count()
        elif self.accept("in"):
            part = self.part()
        return Loop(kind, axis, self.body(), step, part)

    def call(self) -> Call:
        function, name, size = self.name("a function"), self.name("a line"), 0
        if self.accept("into"):
            self.expect(BLOCK)
            self.expect("[")
            size = self.count()
            self.expect("]")
        self.expect("{")
        self.end_statement()
        lines: list[Line] = []
        while not self.accept("}"):
            lines.append(self.line())
            self.end_statement()
        if name not in (line.out for line in lines):
            raise self.error(f"the call has no line {name}")
        return Call(function, next(line for line in lines if line.out == name), tuple(lines), size)
