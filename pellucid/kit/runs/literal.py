"""Values as program text: what a program that reproduces a failure needs to call the failing code.

Small tensors, and tensors filled with one number, are written as literals. All other memory goes into one file of raw
bytes next to the program, whose text contains the offsets: no pickle, nothing to trust but torch. Tensors are restored
bit for bit, with dtype, strides, offset and shared memory.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# The maximum number of elements of a tensor that is written as a literal.
LITERAL = 64
_ALIGNMENT = 64
_BYTES = "memory"


class NotWritable(ValueError):
    """A value that cannot be written as program text."""


@dataclass(frozen=True, slots=True)
class Written:
    """statements: to run first, in the same scope; none if no file is needed.
    expressions: one per value. Both use the program's `torch`, `Path` (of pathlib) and `__file__`.
    file: the file of raw bytes, if there is one.
    """

    statements: tuple[str, ...]
    expressions: tuple[str, ...]
    file: Path | None = None

    def function(self, name: str = "make_inputs") -> str:
        """A function that returns all values as a list, new ones on every call."""
        lines = [*self.statements, "return [", *(f"    {each}," for each in self.expressions), "]"]
        return f"def {name}():\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def write_values(values: Sequence[Any], folder: Path, stem: str = "inputs") -> Written:
    """Program text for values: tensors, numbers, strings, None, dtypes, devices, and lists, tuples and dicts of them.

    Memory that is not written as a literal goes to `STEM.bin` in `folder`; the program has to be in the same folder.
    Raises NotWritable for any other value, and for tensors that are not dense and on the CPU.
    """
    writer = _Writer(shared=_shared(values))
    expressions = tuple(map(writer.text, values))
    file = Path(folder) / f"{stem}.bin"
    if not writer.parts:
        return Written((), expressions)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        for start, storage in zip(writer.starts, writer.parts, strict=True):
            out.write(bytes(start - out.tell()))
            out.write(_bytes(storage))
    return Written(tuple(_statements(writer, file)), expressions, file)


def _statements(writer: _Writer, file: Path) -> list[str]:
    size = writer.starts[-1] + writer.parts[-1].nbytes()
    lines = [
        f'{_BYTES} = torch.from_file(str(Path(__file__).with_name("{file.name}")), size={size}, dtype=torch.uint8)'
    ]
    for number, (start, part) in enumerate(zip(writer.starts, writer.parts, strict=True)):
        lines.append(f"{_BYTES}_{number} = {_BYTES}[{start} : {start + part.nbytes()}].clone().untyped_storage()")
    return lines


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a value that may be a list, a tuple or a dict."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _shared(values: Sequence[Any]) -> set[int]:
    """The addresses of storages that several tensors share."""
    seen: set[int] = set()
    shared: set[int] = set()
    for tensor in _tensors(list(values)):
        _check(tensor)
        address = tensor.untyped_storage().data_ptr()
        (shared if address in seen else seen).add(address)
    return shared - {0}


def _check(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise NotWritable(f"a tensor of the class {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_neg():
        raise NotWritable(f"a tensor of layout {tensor.layout} on {tensor.device}, negated by a bit: {tensor.is_neg()}")


@dataclass(slots=True)
class _Writer:
    """shared: addresses of storages that several tensors share. parts, starts: the storages in the file, and their
    offsets. numbers: the index of a storage in `parts`, by address."""

    shared: set[int]
    parts: list[torch.UntypedStorage] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)

    def text(self, value: Any) -> str:
        """An expression for a value."""
        match value:
            case torch.Tensor():
                return self.tensor(value)
            case list():
                return "[" + ", ".join(map(self.text, value)) + "]"
            case torch.Size():
                return f"torch.Size({list(value)})"
            case tuple() if type(value) is tuple:
                return "(" + "".join(f"{self.text(each)}, " for each in value).rstrip(" ") + ")"
            case dict():
                return "{" + ", ".join(f"{key!r}: {self.text(item)}" for key, item in value.items()) + "}"
            case torch.device():
                return f"torch.device({str(value)!r})"
            case None | str() | torch.dtype() | torch.layout() | torch.memory_format():
                return repr(value)
            case bool() | int() | float() | complex():
                return _number(value)
        raise NotWritable(f"{type(value).__name__} {value!r}")

    def tensor(self, tensor: torch.Tensor) -> str:
        """An expression for a tensor: a literal if it fills its storage and does not share it, else from the file."""
        plain = tensor.detach()
        alone = plain.untyped_storage().data_ptr() not in self.shared
        text = (self._literal(plain) if alone else None) or self._stored(plain)
        if isinstance(tensor, torch.nn.Parameter):
            return f"torch.nn.Parameter({text}, requires_grad={tensor.requires_grad})"
        return f"{text}.requires_grad_()" if tensor.requires_grad else text

    def _literal(self, tensor: torch.Tensor) -> str | None:
        """A literal; None if it would not restore the same bits, or would be long."""
        if tensor.storage_offset() or tensor.is_conj():
            return None
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            return None
        shape = tuple(tensor.shape)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        first = flat[:1]
        if flat.numel() > LITERAL and _bits(flat).view(flat.numel(), -1).eq(_bits(first).view(1, -1)).all():
            text, again = f"torch.full({shape}, {_number(first.item())}, dtype={tensor.dtype})", first
        elif flat.numel() <= LITERAL:
            text, again = f"torch.tensor({_numbers(tensor.tolist())}, dtype={tensor.dtype})", flat
            if not flat.numel():
                text = f"torch.empty({shape}, dtype={tensor.dtype})"
        else:
            return None
        if not _round_trips(again):
            return None
        if tensor.is_contiguous() and tensor.stride() == torch.empty(shape, device="meta").stride():
            return text
        return f"torch.empty_strided({shape}, {tensor.stride()}, dtype={tensor.dtype}).copy_({text})"

    def _stored(self, tensor: torch.Tensor) -> str:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self.numbers:
            self.numbers[address] = len(self.parts)
            end = self.starts[-1] + self.parts[-1].nbytes() if self.parts else 0
            self.starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            self.parts.append(storage)
        view = f"{self.numbers[address]}, {tensor.storage_offset()}, {tuple(tensor.shape)}, {tensor.stride()}"
        text = f"torch.empty(0, dtype={tensor.dtype}).set_({_BYTES}_{view})"
        return f"{text}.conj()" if tensor.is_conj() else text


def _round_trips(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers restore its bits: a NaN may have other bits, and some dtypes have no numbers."""
    try:
        numbers = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
        numbers = torch.where(numbers.isnan(), torch.nan, numbers) if numbers.is_floating_point() else numbers
    except (RuntimeError, OverflowError, TypeError):
        return False
    return torch.equal(_bits(numbers.to(tensor.dtype)), _bits(tensor))


def _numbers(value: Any) -> str:
    return "[" + ", ".join(map(_numbers, value)) + "]" if isinstance(value, list) else _number(value)


def _number(value: complex) -> str:
    """A Python number as text, with torch's names for those without a literal."""
    if isinstance(value, complex):
        return f"complex({_number(value.real)}, {_number(value.imag)})"
    if isinstance(value, float) and value != value:
        return "torch.nan"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "torch.inf" if value > 0 else "-torch.inf"
    return repr(value)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())  # type: ignore[call-overload]
