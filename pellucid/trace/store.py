"""Writing run folders, and the same texts where `TORCH_TRACE` wants them."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from typing_extensions import TypeIs

from pellucid.capture.torch_compat import structured_artifact
from pellucid.codegen import annotate
from pellucid.errors import UserError
from pellucid.ir.index import Expr, text
from pellucid.ir.nodes import Extern, Kernel
from pellucid.ir.origin import Origin, merge
from pellucid.ir.printer import print_program
from pellucid.options import Options
from pellucid.schedule.cost import kernel_cost
from pellucid.trace import schema
from pellucid.trace.fx_programs import Constants, readable, runnable
from pellucid.trace.output_code import output_code
from pellucid.trace.provenance import provenance
from pellucid.trace.record import GraphRecord

# Arguments that take more memory are not written into a run folder.
_MOST_BYTES = 1 << 30


def write_run(record: GraphRecord, options: Options) -> Path:
    """Write everything known about one graph into a new folder below `options.trace`; returns the folder.

    A stage that did not run leaves its files out.
    """
    folder = _new_folder(Path(options.trace), record.name)
    constants = Constants()
    for name, make in _texts(record, options, constants).items():
        (folder / name).write_text(make(), encoding="utf-8")
    _write_sources(folder / "kernels", record)
    write_values(folder, constants.tensors)
    return folder


def log_structured(record: GraphRecord, options: Options) -> None:
    """Give the texts of a run to `TORCH_TRACE`, if that is set: `tlparse` shows each as a file of its own."""
    for name, make in _texts(record, options, Constants()).items():
        stem, _, kind = name.rpartition(".")
        structured_artifact(f"pellucid_{record.name}_{stem}", "json" if kind == "json" else "string", make)


def _texts(record: GraphRecord, options: Options, constants: Constants) -> dict[str, Callable[[], str]]:
    """The text files of a run by name."""
    name, kind = record.name, record.kind
    texts: dict[str, Callable[[], str]] = {
        "run.json": lambda: json.dumps(_run(record, options), indent=1),
        "fx_graph_readable.py": lambda: readable(record.captured),
        "fx_graph_runnable.py": lambda: runnable(record.captured, f"Captured FX graph of {name}.", kind, constants),
        "fx_graph_transformed.py": lambda: runnable(record.graph, f"Transformed FX graph of {name}.", kind, constants),
    }
    if record.lowered.outputs or record.lowered.nodes:
        texts["ir_pre_fusion.txt"] = lambda: print_program(record.lowered)
    if record.scheduled.outputs or record.scheduled.nodes:
        texts["ir_post_fusion.txt"] = lambda: print_program(record.scheduled)
    if record.outline:
        texts["segments.txt"] = lambda: record.outline + "\n"
    elif record.kernels or not record.error:
        texts["output_code.py"] = lambda: output_code(record, constants)
        texts["provenance.json"] = lambda: json.dumps(provenance(record), indent=1)
    texts["decisions.csv"] = lambda: _csv(schema.DECISION_COLUMNS, _decisions(record))
    texts["kernels.csv"] = lambda: _csv(schema.KERNEL_COLUMNS, _kernels(record))
    return texts


def write_values(folder: Path, constants: Sequence[torch.Tensor], inputs: Sequence[Any] | None = None) -> None:
    """Write what the programs of a run folder run with: the constants, and the arguments of the first call."""
    part = folder / f".{schema.VALUES}"
    torch.save({"constants": list(constants), "inputs": None if inputs is None else list(inputs)}, part)
    part.replace(folder / schema.VALUES)


class Recorded:
    """A compiled graph whose first arguments go into its run folder."""

    _boxed_call = True

    def __init__(self, run: Callable[[list[Any]], list[Any]], folder: Path) -> None:
        self._run = run
        self._folder: Path | None = folder

    def __call__(self, args: list[Any]) -> list[Any]:
        folder, self._folder = self._folder, None
        if folder is not None:
            _record_inputs(folder, args)
        return self._run(args)


def _record_inputs(folder: Path, args: Sequence[Any]) -> None:
    """Nothing is written where the arguments are no plain values, or more than a folder should hold."""
    if not all(value is None or isinstance(value, torch.Tensor | torch.SymInt | int | float | str) for value in args):
        return
    plain = [_plain(value) for value in args]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain if _is_dense(each)}
    if sum(memory.values()) > _MOST_BYTES:
        return
    path = folder / schema.VALUES
    try:
        write_values(folder, torch.load(path, weights_only=True)["constants"], plain)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}", hint="give a folder that is writable") from error


def _plain(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return 0  # a jagged size is no number, and nobody reads it
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_dense(value: Any) -> TypeIs[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _new_folder(parent: Path, name: str) -> Path:
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{name}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"cannot write the trace to {parent}: {error}", hint="give a folder that is writable"
        ) from error
    return folder


def environment() -> dict[str, Any]:
    """What the results of a run depend on beside the program."""
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _run(record: GraphRecord, options: Options) -> dict[str, Any]:
    records = record.programs
    nodes = [node for each in records for node in each.scheduled.nodes]
    return {
        "schema_version": schema.VERSION,
        "name": record.name,
        "kind": record.kind,
        "environment": environment(),
        "options": asdict(options),
        "stages": [
            {"name": stage.name, "seconds": round(stage.seconds, 6)} for stage in (*record.earlier, *record.stages)
        ],
        "build": None if record.built is None else asdict(record.built),
        "counts": {
            "fx_calls": sum(node.op == "call_function" for node in record.captured.graph.nodes),
            "kernels_before_fusion": sum(isinstance(node, Kernel) for each in records for node in each.lowered.nodes),
            "kernels": sum(isinstance(node, Kernel) for node in nodes),
            "distinct_kernels": len({kernel.name for each in records for kernel in each.kernels.values()}),
            "fallbacks": sum(isinstance(node, Extern) for node in nodes) + len(record.eager),
        },
        "parts": [part.name for part in record.parts],
        "fallbacks": _fallbacks(record),
        "error": None if record.error is None else {"type": type(record.error).__name__, "text": str(record.error)},
    }


def _fallbacks(record: GraphRecord) -> list[dict[str, Any]]:
    """Calls of ATen by operator, with the reason."""
    counts: dict[tuple[str, str], int] = {}
    for _, call in record.eager:
        op = str(dict(call.facts)["op"])
        counts[op, call.why] = counts.get((op, call.why), 0) + 1
    for node in (node for program in record.programs for node in program.scheduled.nodes):
        if isinstance(node, Extern):
            counts[node.op, node.reason] = counts.get((node.op, node.reason), 0) + 1
    return [{"op": op, "reason": reason, "calls": calls} for (op, reason), calls in counts.items()]


def _decisions(record: GraphRecord) -> Iterable[tuple[Any, ...]]:
    for decision in record.decisions:
        facts = "; ".join(f"{name}={value}" for name, value in decision.facts)
        yield decision.rule, " ".join(decision.subject), int(decision.ok), decision.why, facts


def _kernels(record: GraphRecord) -> Iterable[tuple[Any, ...]]:
    for position, node in enumerate(record.scheduled.nodes):
        compiled = record.kernels.get(node.name)
        if not isinstance(node, Kernel) or compiled is None:
            continue
        origin = origin_of_kernel(node)
        cost = kernel_cost(node)
        yield (
            node.name,
            compiled.name,
            position,
            " ".join(origin.nodes),
            " ".join(map(str, origin.users)),
            " ".join(f"{axis.name}:{text(axis.extent)}" for axis in node.space),
            " ".join(node.reduced),
            sum(1 for _ in node.loads()),
            sum(1 for _ in node.stores()),
            _size(cost.loaded),
            _size(cost.stored),
            _size(cost.flops),
            int(compiled.plan.vector is not None),
            _size(compiled.extent),
            compiled.grain,
        )


def origin_of_kernel(kernel: Kernel) -> Origin:
    """All FX nodes and user lines that a kernel implements."""
    return merge(line.origin for line in kernel.body)


def _size(value: Expr | int) -> str | int:
    return text(value) if isinstance(value, Expr) else value


def _csv(columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _write_sources(folder: Path, record: GraphRecord) -> None:
    folder.mkdir()
    for kernel in {kernel.name: kernel for kernel in record.kernels.values()}.values():
        (folder / f"{kernel.name}.cpp").write_text(annotate(kernel), encoding="utf-8")
