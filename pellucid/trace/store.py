"""Writing run folders, and the same texts to `TORCH_TRACE`."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import TypeIs

from pellucid.capture.torch_compat import structured_artifact
from pellucid.codegen import CppKernel, annotate, packings_of
from pellucid.codegen.nest_text import print_nest
from pellucid.errors import UserError
from pellucid.ir.decision import Decision
from pellucid.ir.index import Expr, text
from pellucid.ir.nodes import Compute, Extern, Kernel, Node, Reduce
from pellucid.ir.origin import Origin, merge
from pellucid.ir.printer import print_program
from pellucid.machine.work import kernel_cost
from pellucid.options import Options
from pellucid.trace import schema
from pellucid.trace.environment import environment
from pellucid.trace.folder import RunWriter
from pellucid.trace.fx_programs import Constants, readable, runnable
from pellucid.trace.output_code import output_code
from pellucid.trace.provenance import provenance
from pellucid.trace.record import GraphRecord

# Arguments of more bytes in total are not written to a run folder.
_MAX_BYTES = 1 << 30


def write_run(record: GraphRecord, options: Options) -> Path:
    """Write everything known about one graph to a new run below `options.trace`; returns the graph's folder in it.

    The files of stages that did not run are missing.
    """
    parent, name = Path(options.trace), record.name
    changed = {each.name: value for each in fields(options) if (value := getattr(options, each.name)) != each.default}
    changed.pop("trace")
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{name}"
    writer = RunWriter.create(folder, backend="pellucid", options=changed)
    constants = Constants()
    writer.add_texts(name, {file: text_of() for file, text_of in texts_of(record, constants).items()})
    with suppress(UserError):  # it calls functions of the user's program: it cannot be written as data
        writer.add_graph(name, record.kind, record.captured)
    writer.add_values(name, constants=constants.tensors)
    writer.note_compiled(name, facts_of(record))
    writer.add_sources(sources_of(record))
    writer.add_rows("kernels.csv", kernel_rows(record))
    writer.add_rows("decisions.csv", decision_rows(record))
    return writer.of_graph(name)


def add_decision(record: GraphRecord, folder: Path, decision: Decision) -> None:
    """Add a decision that was made after the last stage to the run of a graph. folder: of the graph."""
    RunWriter(folder.parents[1]).add_rows("decisions.csv", decision_rows(replace(record, decisions=(decision,))))


def log_structured(record: GraphRecord, options: Options) -> None:
    """Write the texts of a run to `TORCH_TRACE`, if that is set: `tlparse` shows each as a separate file."""
    texts = texts_of(record, Constants())
    texts["run.json"] = lambda: json.dumps(
        {"environment": environment(), "options": asdict(options), **facts_of(record)}, indent=1
    )
    texts["decisions.csv"] = lambda: _csv("decisions.csv", decision_rows(record))
    texts["kernels.csv"] = lambda: _csv("kernels.csv", kernel_rows(record))
    for name, text_of in texts.items():
        stem, _, kind = name.rpartition(".")
        structured_artifact(f"pellucid_{record.name}_{stem}", "json" if kind == "json" else "string", text_of)


def texts_of(record: GraphRecord, constants: Constants) -> dict[str, Callable[[], str]]:
    """The text files of a graph by name."""
    name, kind = record.name, record.kind
    texts: dict[str, Callable[[], str]] = {
        "fx_graph_readable.py": lambda: readable(record.captured),
        "fx_graph_runnable.py": lambda: runnable(record.captured, f"Captured FX graph of {name}.", kind, constants),
        "fx_graph_transformed.py": lambda: runnable(record.graph, f"Transformed FX graph of {name}.", kind, constants),
    }
    if record.lowered.outputs or record.lowered.nodes:
        texts["ir_pre_fusion.txt"] = lambda: print_program(record.lowered)
    if record.scheduled.outputs or record.scheduled.nodes:
        texts["ir_post_fusion.txt"] = lambda: print_program(record.scheduled)
    if record.before is not None:
        before = record.before.scheduled
        texts["ir_frozen.txt"] = lambda: print_program(before)
    if record.kernels:
        texts["loops.txt"] = lambda: "\n\n".join(_nests(record)) + "\n"
    if record.outline:
        texts["segments.txt"] = lambda: record.outline + "\n"
    elif record.plan is not None:
        plans = [each.plan for each in (record.before, record) if each is not None]
        texts["execution_plan.txt"] = lambda: "".join(f"{plan}\n" for plan in plans)
        texts["output_code.py"] = lambda: output_code(record, constants)
        texts["provenance.json"] = lambda: json.dumps(provenance(record), indent=1)
    return texts


class Recorded:
    """A compiled graph that writes the arguments of its first call to its run folder."""

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
    """Write the arguments, unless some are no plain values or they exceed `_MAX_BYTES`."""
    if not all(value is None or isinstance(value, torch.Tensor | torch.SymInt | int | float | str) for value in args):
        return
    plain = [_plain(value) for value in args]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain if _is_dense(each)}
    if sum(memory.values()) > _MAX_BYTES:
        return
    try:
        with suppress(UserError):  # a tensor that is not dense
            RunWriter(folder.parents[1]).add_values(folder.name, inputs=plain)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}", hint="give a folder that is writable") from error


def _plain(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return 0  # a size of a jagged tensor is not a number, and is not read
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_dense(value: Any) -> TypeIs[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def facts_of(record: GraphRecord) -> dict[str, Any]:
    """The entry of `run.json` for a graph."""
    records = record.programs
    nodes = [node for each in records for node in each.scheduled.nodes]
    return {
        "kind": record.kind,
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


def decision_rows(record: GraphRecord) -> Iterator[dict[str, Any]]:
    """Rows of `decisions.csv`."""
    origins = {node.name: origin_of(node) for node in (*record.lowered.nodes, *record.scheduled.nodes)}
    for decision in record.decisions:
        origin = merge(origins[name] for name in decision.subject if name in origins)
        yield {
            "graph": record.name,
            "rule": decision.rule,
            "subject": " ".join(decision.subject),
            "ok": int(decision.ok),
            "why": decision.why,
            "facts": "; ".join(f"{name}={value}" for name, value in decision.facts),
            "fx_nodes": " ".join(origin.nodes),
            "user_lines": " ".join(map(str, origin.users)),
        }


def kernel_rows(record: GraphRecord) -> Iterator[dict[str, Any]]:
    """Rows of `kernels.csv`, for kernels that were built and for library calls."""
    for position, node in enumerate(record.scheduled.nodes):
        if isinstance(node, Kernel) and node.name not in record.kernels:
            continue
        origin = origin_of(node)
        yield {
            "graph": record.name,
            "kernel": node.name,
            "op": node.op if isinstance(node, Extern) else "",
            "position": position,
            "fx_nodes": " ".join(origin.nodes),
            "user_lines": " ".join(map(str, origin.users)),
            **(kernel_facts(node, record.kernels[node.name]) if isinstance(node, Kernel) else {}),
        }


def kernel_facts(node: Kernel, compiled: CppKernel) -> dict[str, Any]:
    """The columns of a row that describe the kernel itself."""
    cost = kernel_cost(node)
    return {
        "symbol": compiled.name,
        "ir_ops": " ".join(line.rhs.op for line in node.body if isinstance(line.rhs, Compute | Reduce)),
        "space": " ".join(f"{axis.name}:{text(axis.extent)}" for axis in node.space),
        "reduced": " ".join(node.reduced),
        "loads": sum(1 for _ in node.loads()),
        "stores": sum(1 for _ in node.stores()),
        "bytes_loaded": _size(cost.loaded),
        "bytes_stored": _size(cost.stored),
        "flops": _size(cost.flops),
        "vectorized": int(compiled.plan.vector is not None),
        "extent": _size(compiled.extent),
        "grain": compiled.grain,
    }


def sources_of(record: GraphRecord) -> dict[str, str]:
    """The C++ of each distinct kernel, annotated, by symbol, including kernels that run before the first call."""
    before = sources_of(record.before) if record.before else {}
    packings = {each.name: each.source for each in packings_of(record.kernels)}
    return {
        **before,
        **packings,
        **{each.name: annotate(each) for kernel in record.kernels.values() for each in kernel.variants},
    }


def _nests(record: GraphRecord) -> Iterator[str]:
    """The loop nest of each kernel, in the order of calls."""
    for each in filter(None, (record.before, record)):
        for node in each.scheduled.nodes:
            if node.name in each.kernels:
                yield print_nest(each.kernels[node.name].nest_of(node.name))


def origin_of(node: Node) -> Origin:
    """All FX nodes and user lines that a node implements."""
    return merge(line.origin for line in node.body) if isinstance(node, Kernel) else node.origin


def _size(value: Expr | int) -> str | int:
    return text(value) if isinstance(value, Expr) else value


def _csv(file: str, rows: Iterable[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, schema.TABLES[file], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
