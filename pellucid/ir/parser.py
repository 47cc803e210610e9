"""Parses kernels, programs and index expressions from the text that `printer` writes.

A hand-written recursive-descent parser: one class, hence one long file, with a method per rule of the grammar, which is

    program = "program" "{" ["symbols" names] derived* buffer* ["inputs" input ("," input)*] node* output* "}"
    derived = "derived" name ":" ("int" | "float") "=" formula
    formula = function "(" formula ("," formula)* ")" | "true" | "false" | a float | expr
    buffer  = "buffer" name ":" dtype "[" expr "]" ("input" | "temp" | "output")
    input   = name | "-"
    node    = kernel | extern
    kernel  = "kernel" name ["<" names ">"] "(" [param ","]* ")" "{" ["axes" axis ("," axis)*] line* "}"
    param   = name ":" dtype "[" expr "]"
    axis    = name ":" expr
    line    = name ":" dtype "=" rhs
    rhs     = "const" scalar | "index" expr | "check" name "," expr ["nowrap"]
            | "load" name "[" expr "]" [["if" name] "else" scalar] | "store" [join] name "[" expr "]" "," name
            | operator names | reduction name "over" names
    extern  = "extern" name "=" op "{" ("arg" arg)* ("kwarg" name "=" arg)* output*
              ["out"] ["mutates" names] ["ordered"] ["reason" string] "}"
    output  = "output" arg
    arg     = "none" | "size" expr | "number" name | view | string | scalar | name "." name | "(" [arg ","]* ")"
    view    = "view" name sizes "strides" sizes "offset" expr
    expr    = term (("+" | "-") term)*
    term    = factor (("*" | "//" | "%") factor)*
    factor  = number | name | "[" name "]" | "(" expr ")" | "-" factor

Statements end with the line; inside parentheses and brackets a line break is whitespace. The parser checks
the grammar and the names in index expressions; `verify` checks everything else.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeVar

from typing_extensions import Self

from pellucid.errors import UserError
from pellucid.ir.derived import FUNCTIONS, Apply, Derived, Float, Term
from pellucid.ir.index import Expr, const, floordiv, mod, sym, val, var
from pellucid.ir.nodes import (
    Arg,
    Axis,
    Buffer,
    CheckIndex,
    Compute,
    Const,
    Enum,
    Extern,
    IndexValue,
    Kernel,
    Line,
    Load,
    Node,
    Param,
    Program,
    Reduce,
    Rhs,
    Scalar,
    Store,
    View,
)
from pellucid.ir.ops import JOINS, OPS, REDUCTIONS
from pellucid.ir.types import DType

T = TypeVar("T")


class IRSyntaxError(UserError):
    """Text that is not IR; `line` and `column` count from 1."""

    code = "ir-syntax"

    def __init__(self, message: str, source: str, line: int, column: int, *, hint: str = "") -> None:
        self.line = line
        self.column = column
        shown = source.split("\n")[line - 1]
        super().__init__(f"line {line}, column {column}: {message}\n  {shown}\n  {' ' * (column - 1)}^", hint=hint)


def parse_kernel(text: str) -> Kernel:
    """The kernel that `print_kernel` wrote."""
    return Parser(text).whole(Parser.kernel)


def parse_program(text: str) -> Program:
    """The program that `print_program` wrote."""
    return Parser(text).whole(Parser.program)


def parse_expr(text: str, axes: Collection[str] = (), symbols: Collection[str] = ()) -> Expr:
    """An index expression over these axes and size symbols.

    >>> parse_expr("8*(i0 // 4) + s0*[v3] - 1", axes=["i0"], symbols=["s0"])
    s0*[v3] + 8*(i0 // 4) - 1
    """

    def rule(parser: Parser) -> Expr:
        parser.axes, parser.symbols = frozenset(axes), frozenset(symbols)
        return parser.expr()

    return Parser(text).whole(rule)


class _Token(NamedTuple):
    kind: str  # name, number, string, mark, newline or end
    text: str
    line: int
    column: int


_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<number>[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<string>"([^"\\\n]|\\.)*")
      | (?P<mark>//|::|[-+*%(){}\[\]<>,:=.])""",
    re.VERBOSE,
)


def _tokens(source: str) -> list[_Token]:
    tokens: list[_Token] = []
    position, line, start, depth = 0, 1, 0, 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        column = position - start + 1
        if match is None or match.lastgroup is None:
            raise IRSyntaxError(f"unexpected character {source[position]!r}", source, line, column)
        kind, text = match.lastgroup, match.group()
        depth += (text in ("(", "[")) - (text in (")", "]"))
        # A statement ends with its line, except inside parentheses; empty lines are skipped.
        ends = kind == "newline" and depth <= 0 and tokens and tokens[-1].kind != "newline"
        if ends or kind not in ("blank", "newline"):
            tokens.append(_Token(kind, text, line, column))
        position = match.end()
        if kind == "newline":
            line, start = line + 1, position
    tokens.append(_Token("end", "", line, position - start + 1))
    return tokens


class Parser:
    """A method per rule of the grammar; `whole` runs one of them on a text."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = _tokens(source)
        self.position = 0
        self.axes: frozenset[str] = frozenset()
        self.symbols: frozenset[str] = frozenset()

    def whole(self, rule: Callable[[Self], T]) -> T:
        """The result of `rule` on the whole text."""
        self.newlines()
        result = self.located(rule)
        self.newlines()
        self.expect_kind("end", "the end of the text")
        return result

    # ---------------------------------------------------------------------------------------- tokens

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def advance(self) -> _Token:
        token = self.token
        self.position = min(self.position + 1, len(self.tokens) - 1)
        return token

    def error(self, message: str, token: _Token | None = None, hint: str = "") -> IRSyntaxError:
        token = token or self.token
        return IRSyntaxError(message, self.source, token.line, token.column, hint=hint)

    def located(self, rule: Callable[[Self], T]) -> T:
        """Apply `rule`; report nesting too deep for recursive descent as a syntax error."""
        try:
            return rule(self)
        except RecursionError:
            raise self.error("expression is nested too deeply") from None

    def at(self, text: str) -> bool:
        return self.token.kind in ("name", "mark") and self.token.text == text

    def accept(self, text: str) -> bool:
        if not self.at(text):
            return False
        self.advance()
        return True

    def expect(self, text: str) -> _Token:
        if not self.at(text):
            raise self.error(f"expected {text!r}, found {self.found()}")
        return self.advance()

    def expect_kind(self, kind: str, what: str) -> _Token:
        if self.token.kind != kind:
            raise self.error(f"expected {what}, found {self.found()}")
        return self.advance()

    def found(self) -> str:
        words = {"newline": "the end of the line", "end": "the end of the text"}
        return words.get(self.token.kind) or repr(self.token.text)

    def newlines(self) -> None:
        while self.token.kind == "newline":
            self.advance()

    def end_statement(self) -> None:
        if not self.at("}"):
            self.expect_kind("newline", "the end of the line")
        self.newlines()

    def name(self, what: str) -> str:
        return self.expect_kind("name", what).text

    def names(self, what: str) -> tuple[str, ...]:
        return self.separated(lambda: self.name(what))

    def separated(self, item: Callable[[], T]) -> tuple[T, ...]:
        items = [item()]
        while self.accept(","):
            items.append(item())
        return tuple(items)

    def enclosed(self, item: Callable[[], T]) -> tuple[T, ...]:
        """`( item, item )`, possibly empty or with a trailing comma."""
        items: list[T] = []
        self.expect("(")
        while not self.at(")"):
            items.append(item())
            if not self.accept(","):
                break
        self.expect(")")
        return tuple(items)

    def one_of(self, known: Iterable[str], what: str) -> str:
        known = list(known)
        token = self.expect_kind("name", what)
        if token.text in known:
            return token.text
        close = difflib.get_close_matches(token.text, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else ""
        raise self.error(f"unknown {what} {token.text!r}", token, hint)

    # ---------------------------------------------------------------------------------------- kernels

    def kernel(self) -> Kernel:
        outer = self.symbols, self.axes
        name, params, space = self.head("kernel")
        body: list[Line] = []
        while not self.accept("}"):
            body.append(self.line())
            self.end_statement()
        self.symbols, self.axes = outer
        return Kernel(name, params, space, tuple(body))

    def head(self, word: str) -> tuple[str, tuple[Param, ...], tuple[Axis, ...]]:
        """Name, parameters and axes; the expressions that follow may use these axes and symbols."""
        self.expect(word)
        name = self.name("a kernel name")
        symbols: tuple[str, ...] = ()
        if self.accept("<"):
            symbols = self.names("a size symbol")
            self.expect(">")
        self.symbols, self.axes = frozenset(symbols), frozenset()
        params = self.enclosed(self.param)
        self.expect("{")
        self.end_statement()
        space = self.space()
        self.axes = frozenset(axis.name for axis in space)
        return name, params, space

    def param(self) -> Param:
        name = self.name("a buffer name")
        self.expect(":")
        return Param(name, *self.memory())

    def memory(self) -> tuple[DType, Expr]:
        dtype = self.dtype()
        self.expect("[")
        numel = self.expr()
        self.expect("]")
        return dtype, numel

    def dtype(self) -> DType:
        return DType(self.one_of([dtype.value for dtype in DType], "element type"))

    def space(self) -> tuple[Axis, ...]:
        following = self.tokens[min(self.position + 1, len(self.tokens) - 1)]
        if not self.at("axes") or following.kind != "name":
            return ()
        self.advance()
        axes = self.separated(self.axis)
        self.end_statement()
        return axes

    def axis(self) -> Axis:
        name = self.name("an axis name")
        self.expect(":")
        return Axis(name, self.expr())

    def line(self) -> Line:
        out = self.name("a line `name: type = ...`")
        self.expect(":")
        dtype = self.dtype()
        self.expect("=")
        return Line(out, self.rhs(), dtype)

    def rhs(self) -> Rhs:
        word = self.one_of(["const", "index", "check", "load", "store", *OPS, *REDUCTIONS], "operator")
        match word:
            case "const":
                return Const(self.scalar())
            case "index":
                return IndexValue(self.expr())
            case "check":
                return self.check()
            case "load":
                return self.load()
            case "store":
                joins = self.tokens[self.position + 1].kind == "name"  # a buffer's name is followed by a bracket
                join = self.one_of(JOINS, "operator") if joins else ""
                buffer, index = self.element()
                self.expect(",")
                return Store(buffer, index, self.name("a value"), join)
            case _ if word in OPS:
                return Compute(word, self.names("a value"))
            case _:
                arg = self.name("a value")
                self.expect("over")
                return Reduce(word, arg, self.names("an axis"))

    def check(self) -> CheckIndex:
        arg = self.name("a value")
        self.expect(",")
        size = self.expr()
        wrap = not self.accept("nowrap")
        dim = int(self.expect_kind("number", "a dimension").text) if self.accept("dim") else 0
        return CheckIndex(arg, size, wrap, dim)

    def load(self) -> Load:
        buffer, index = self.element()
        mask = self.name("a mask") if self.accept("if") else None
        if mask is None and not self.at("else"):
            return Load(buffer, index)
        self.expect("else")
        return Load(buffer, index, mask, self.scalar())

    def element(self) -> tuple[str, Expr]:
        buffer = self.name("a buffer name")
        self.expect("[")
        index = self.expr()
        self.expect("]")
        return buffer, index

    def scalar(self) -> Scalar:
        if self.at("true") or self.at("false"):
            return self.advance().text == "true"
        negative = self.accept("-")
        value = self.number()
        return -value if negative else value

    def number(self) -> int | float:
        if self.accept("nan"):
            return math.nan
        if self.accept("inf"):
            return math.inf
        digits = self.expect_kind("number", "a number, `true` or `false`").text
        return int(digits) if digits.isdigit() else float(digits)

    # ---------------------------------------------------------------------------------------- programs

    def program(self) -> Program:
        self.expect("program")
        self.expect("{")
        self.end_statement()
        symbols = self.names_after("symbols", lambda: self.name("a size symbol"))
        self.symbols = frozenset(symbols)
        derived: list[Derived] = []
        while self.accept("derived"):
            derived.append(self.derived())
            self.end_statement()
        buffers: list[Buffer] = []
        while self.at("buffer"):
            buffers.append(self.buffer())
            self.end_statement()
        inputs = self.names_after("inputs", self.input)
        nodes: list[Node] = []
        while self.at("kernel") or self.at("extern"):
            nodes.append(self.kernel() if self.at("kernel") else self.extern())
            self.end_statement()
        outputs: list[View | Expr | None] = []
        while not self.accept("}"):
            outputs.append(self.program_output())
            self.end_statement()
        return Program(symbols, tuple(buffers), inputs, tuple(nodes), tuple(outputs), tuple(derived))

    def derived(self) -> Derived:
        """An integer becomes a symbol for expressions that follow, a float does not."""
        name = self.name("a name")
        self.expect(":")
        is_float = self.one_of(["int", "float"], "kind of number") == "float"
        self.expect("=")
        term = self.formula()
        self.symbols |= frozenset() if is_float else {name}
        return Derived(name, is_float, term)

    def formula(self) -> Term:
        following = self.tokens[min(self.position + 1, len(self.tokens) - 1)]
        if self.token.kind == "name" and following.text == "(":
            function = self.one_of(FUNCTIONS, "function")
            return Apply(function, self.enclosed(self.formula))
        # A minus sign belongs to the float after it, or to an expression.
        sign = int(self.at("-"))
        literal = self.tokens[min(self.position + sign, len(self.tokens) - 1)]
        is_float = literal.kind == "number" and not literal.text.isdigit()
        if is_float or literal.text in ("true", "false", "inf", "nan"):
            return self.scalar()
        return self.expr()

    def names_after(self, word: str, item: Callable[[], T]) -> tuple[T, ...]:
        if not self.accept(word):
            return ()
        items = self.separated(item)
        self.end_statement()
        return items

    def input(self) -> str | None:
        return None if self.accept("-") else self.name("an input")

    def buffer(self) -> Buffer:
        self.expect("buffer")
        name = self.name("a buffer name")
        self.expect(":")
        dtype, numel = self.memory()
        return Buffer(name, dtype, numel, self.one_of(["input", "temp", "output"], "role"))

    def program_output(self) -> View | Expr | None:
        self.expect("output")
        token = self.token
        output = self.arg()
        if output is None or isinstance(output, View | Expr):
            return output
        raise self.error("a program returns a view, a size or none", token)

    def extern(self) -> Extern:
        self.expect("extern")
        name = self.name("the name of the call")
        self.expect("=")
        op = self.operator()
        self.expect("{")
        self.end_statement()
        args = self.repeated("arg", self.arg)
        kwargs = self.repeated("kwarg", self.kwarg)
        outputs = self.repeated("output", self.extern_output)
        out = self.flag("out")
        mutates = self.names_after("mutates", lambda: self.name("a buffer name"))
        ordered = self.flag("ordered")
        reason = "".join(self.repeated("reason", self.string))
        self.expect("}")
        return Extern(name, op, args, kwargs, outputs, out, reason, mutates, ordered)

    def repeated(self, word: str, item: Callable[[], T]) -> tuple[T, ...]:
        items: list[T] = []
        while self.accept(word):
            items.append(item())
            self.end_statement()
        return tuple(items)

    def flag(self, word: str) -> bool:
        if not self.accept(word):
            return False
        self.end_statement()
        return True

    def operator(self) -> str:
        """`aten::addmm.default`, with any number of namespaces."""
        parts = [self.name("an operator `namespace::name.overload`")]
        while self.at("::") or self.at("."):
            parts += [self.advance().text, self.name("a name")]
        return "".join(parts)

    def kwarg(self) -> tuple[str, Arg]:
        name = self.name("the name of an argument")
        self.expect("=")
        return name, self.arg()

    def extern_output(self) -> View | None:
        token = self.token
        output = self.arg()
        if output is None or isinstance(output, View):
            return output
        raise self.error("an operator's output is a view or none", token)

    def arg(self) -> Arg:
        if self.token.kind == "string":
            return self.string()
        if self.at("("):
            return self.enclosed(self.arg)
        if self.at("view"):
            return self.view()
        if self.accept("size"):
            return self.expr()
        if self.accept("number"):
            return Float(self.name("a derived number"))
        if self.accept("none"):
            return None
        following = self.tokens[min(self.position + 1, len(self.tokens) - 1)]
        if self.token.kind == "name" and following.text == ".":
            return self.enum()
        return self.scalar()

    def view(self) -> View:
        self.expect("view")
        buffer = self.name("a buffer name")
        shape = self.enclosed(self.expr)
        self.expect("strides")
        strides = self.enclosed(self.expr)
        self.expect("offset")
        return View(buffer, shape, strides, self.expr())

    def enum(self) -> Enum:
        """`dtype.float32`, `device.cpu`, `device.cpu:0`"""
        kind = self.name("a kind of constant")
        self.expect(".")
        name = self.name("a constant")
        if self.accept(":"):
            name += ":" + self.expect_kind("number", "a device index").text
        return Enum(kind, name)

    def string(self) -> str:
        token = self.expect_kind("string", "a string")
        try:
            return str(json.loads(token.text))
        except ValueError as reason:
            raise self.error(f"not a string: {reason}", token) from None

    # ---------------------------------------------------------------------------------------- expressions

    def expr(self) -> Expr:
        total = self.term()
        while self.at("+") or self.at("-"):
            total = total + self.term() if self.advance().text == "+" else total - self.term()
        return total

    def term(self) -> Expr:
        result = self.factor()
        while self.at("*") or self.at("//") or self.at("%"):
            sign = self.advance()
            right = self.factor()
            if sign.text == "*":
                result = result * right
            elif right.value == 0:
                raise self.error("division by zero", sign)
            else:
                result = floordiv(result, right) if sign.text == "//" else mod(result, right)
        return result

    def factor(self) -> Expr:
        if self.accept("-"):
            return -self.factor()
        if self.accept("("):
            inner = self.expr()
            self.expect(")")
            return inner
        if self.accept("["):
            name = self.name("a value")
            self.expect("]")
            return val(name)
        token = self.advance()
        if token.kind == "number" and token.text.isdigit():
            return const(int(token.text))
        if token.kind == "name" and token.text in self.axes:
            return var(token.text)
        if token.kind == "name" and token.text in self.symbols:
            return sym(token.text)
        if token.kind == "name":
            declared = ", ".join(sorted(self.axes | self.symbols)) or "nothing"
            hint = f"declared here: {declared}; a value is written [{token.text}]"
            raise self.error(f"{token.text!r} is neither an axis nor a size symbol", token, hint)
        self.position -= token.kind != "end"
        raise self.error(f"expected an index expression, found {self.found()}")
