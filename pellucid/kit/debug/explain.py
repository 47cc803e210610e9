"""A compiler's message explained: the kernel, its line, the operator, the FX node, the user's line, the cause.

A C++ error often stands in the line that uses a value, while the fault lies in the line that made it, with another
type than the operator should have. So the types of which the message complains are matched with the operands of the
line; the operand that has not the type that it should have is what is to blame.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pellucid.kit.subjects.refusals import DEFINITION, NAME, Refused, Value, defined_at


@dataclass(frozen=True, slots=True)
class Explanation:
    """What went wrong. cpp_line: number and text of the line to blame. error_line: where the compiler stopped."""

    kernel: str = ""
    cpp_line: str = ""
    error_line: str = ""
    ir_op: str = ""
    fx_node: str = ""
    user_line: str = ""
    cause: str = ""
    hint: str = ""
    message: str = ""


_A, _B = (rf"[‘'`\"](?P<{name}>[^’'\"]+)[’'\"]" for name in "ab")
_CAUSES = (
    (rf"deduced conflicting types .*\({_A} and {_B}", "the operands have different types, {a} and {b}"),
    (r"conflicting types", "the operands have different types"),
    (rf"no match(?:ing)? (?:function )?for (?:call to )?{_A}", "there is no {a} for operands of these types"),
    (rf"cannot convert {_A} to {_B}", "a value of type {a} stands where {b} is needed"),
    (rf"request for member {_A} in {_B}", "{b} has a type that has no {a}"),
    (rf"has no member named {_A}", "the value has a type that has no {a}"),
    (r"invalid operands|wrong type argument|invalid type argument", "the operator does not take values of this type"),
    (r"too (?:many|few) arguments", "a function is called with the wrong number of arguments"),
    (r"was not declared|undeclared", "a name is used that is not defined"),
    (r"expected", "the text of the kernel is not C++"),
)
_TYPES = re.compile(r"for call to [‘'`][^(’']*\((?P<types>[^’']*)\)[’'`]|operand types? (?:is|are) (?P<more>[^)]*)")


def explain(refused: Refused) -> Explanation:
    """Name the line, the operator and the cause behind a compiler's error."""
    lines = refused.source.splitlines()
    text = lines[refused.line - 1] if 0 < refused.line <= len(lines) else ""
    blamed = _line_to_blame(refused, lines, text)
    value = _value_of(refused, lines[blamed - 1]) if blamed else Value("")
    users = value.origin.users
    return Explanation(
        kernel=refused.kernel,
        cpp_line=f"{blamed}: {lines[blamed - 1].strip()}" if blamed else "",
        error_line=f"{refused.line}: {text.strip()}",
        ir_op=f"ops.{value.op}" if value.op else "",
        fx_node=", ".join(value.origin.nodes),
        user_line=str(users[-1]) if users else "",
        cause=_cause(refused, value),
        hint=_hint(value),
        message=refused.message,
    )


def _line_to_blame(refused: Refused, lines: list[str], text: str) -> int:
    """The line that defines the operand with a type that it should not have; else the line of the error."""
    given = _given_types(refused.output)
    definition = DEFINITION.match(text)
    used = NAME.findall(definition["value"] if definition else text)
    operands = [name for name in dict.fromkeys(used) if defined_at(lines, name, refused.line)]
    wrong: list[str] = []
    if len(operands) == len(given):
        for name, kind in zip(operands, given, strict=True):
            expected = _value_of(refused, lines[defined_at(lines, name, refused.line) - 1]).dtype
            if expected and expected not in kind:
                wrong.append(name)
    return defined_at(lines, wrong[0], refused.line) if len(wrong) == 1 else refused.line


def _given_types(output: str) -> list[str]:
    """The types of the operands, as the message lists them."""
    found = _TYPES.search(output)
    if not found:
        return []
    text = found["types"] or found["more"]
    depth, parts, start = 0, [], 0
    text = text.replace(" and ", ", ")
    for at, letter in enumerate(text):
        depth += letter in "<(["
        depth -= letter in ">)]"
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part.strip(" ‘’'`&") for part in (*parts, text[start:])]


def _value_of(refused: Refused, line: str) -> Value:
    found = DEFINITION.match(line)
    return refused.values.get(f"{found['name']} = {found['value']}", Value("")) if found else Value("")


def _cause(refused: Refused, value: Value) -> str:
    """In words: what kind of error it is, and which operator made a value of the wrong type."""
    for pattern, words in _CAUSES:
        found = re.search(pattern, refused.output)
        if found:
            what = words.format(**found.groupdict())
            break
    else:
        what = refused.message
    mismatch = "type mismatch: " if "type" in what else ""
    made = (
        f"; ops.{value.op} should make a value of type {value.dtype}" if value.op and value.dtype and mismatch else ""
    )
    return f"{mismatch}{what}{made}"


def _hint(value: Value) -> str:
    if not value.op:
        return "look at the line in the kernel's source"
    return f"look at how the backend prints ops.{value.op} in C++"
