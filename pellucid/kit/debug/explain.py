"""Explain a C++ compiler's error: the kernel, its line, the operator, the FX node, the user's line, the cause.

A C++ error is often reported for the line that uses a value, while the fault is in the line that defines it with the
wrong type. So the types in the message are matched with the operands of the line; an operand without its expected type
is at fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pellucid.kit.subjects.refusals import DEFINITION, NAME, Refused, Value, defined_at


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation. cpp_line: number and text of the line at fault. error_line: where the compiler stopped."""

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
    (rf"cannot convert {_A} to {_B}", "a value of type {a} is used where {b} is needed"),
    (rf"request for member {_A} in {_B}", "the type of {b} has no member {a}"),
    (rf"has no member named {_A}", "the type of the value has no member {a}"),
    (r"invalid operands|wrong type argument|invalid type argument", "the operator does not accept values of this type"),
    (r"too (?:many|few) arguments", "a function is called with the wrong number of arguments"),
    (r"was not declared|undeclared", "an undefined name is used"),
    (r"expected", "the kernel is not valid C++"),
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
    """The line that defines the only operand with an unexpected type; else the line of the error."""
    operand_types = _operand_types(refused.output)
    definition = DEFINITION.match(text)
    used = NAME.findall(definition["value"] if definition else text)
    operands = [name for name in dict.fromkeys(used) if defined_at(lines, name, refused.line)]
    wrong: list[str] = []
    if len(operands) == len(operand_types):
        for name, kind in zip(operands, operand_types, strict=True):
            expected = _value_of(refused, lines[defined_at(lines, name, refused.line) - 1]).dtype
            if expected and expected not in kind:
                wrong.append(name)
    return defined_at(lines, wrong[0], refused.line) if len(wrong) == 1 else refused.line


def _operand_types(output: str) -> list[str]:
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
    """Describe the kind of error, and the operator whose value has the wrong type."""
    for pattern, words in _CAUSES:
        found = re.search(pattern, refused.output)
        if found:
            what = words.format(**found.groupdict())
            break
    else:
        what = refused.message
    mismatch = "type mismatch: " if "type" in what else ""
    expected = (
        f"; ops.{value.op} should return a value of type {value.dtype}" if value.op and value.dtype and mismatch else ""
    )
    return f"{mismatch}{what}{expected}"


def _hint(value: Value) -> str:
    if not value.op:
        return "inspect the line in the kernel's source"
    return f"inspect how the backend generates C++ for ops.{value.op}"
