"""The files of a run folder and the columns of its tables: the contract with everything that reads runs."""

from __future__ import annotations

VERSION = 2
"""Raised whenever a file or a column changes its meaning."""

VALUES = "values.pt"

FILES: dict[str, str] = {
    "run.json": "environment, options, stages with their times, counts, and the error if one ended the compilation",
    "fx_graph_readable.py": "the captured FX graph with shapes and your source lines, for reading",
    "fx_graph_runnable.py": "the captured FX graph as a program: runs it eagerly and compiled, compares and measures",
    "fx_graph_transformed.py": "the FX graph after Pellucid's own FX passes, as a program",
    "ir_pre_fusion.txt": "loop IR, one kernel per operator",
    "ir_post_fusion.txt": "loop IR after fusion: what is compiled",
    "output_code.py": "the plan as a program with its C++ kernels: edit one, and it says what that changed",
    "kernels": "the C++ of each different kernel, annotated with FX nodes and your source lines",
    "decisions.csv": "every choice of the compiler with its reason: fusions, vectorisation, fallbacks",
    "kernels.csv": "one row per kernel: its operators, sizes, bytes, operations, calls",
    VALUES: "the graph's constants, and the arguments of its first call: what the programs here run with",
    "provenance.json": "from each C++ line to IR line, FX nodes and source lines, and back",
}

SPLIT_FILES: dict[str, str] = {
    "segments.txt": "how a graph that no single program holds is run: its segments, and what Python calls between them",
}
"""Written instead of IR and output code for a graph that was split; each segment has a folder of its own."""

DECISION_COLUMNS = ("rule", "subject", "ok", "why", "facts")
KERNEL_COLUMNS = (
    "kernel",
    "symbol",
    "position",
    "fx_nodes",
    "user_lines",
    "space",
    "reduced",
    "loads",
    "stores",
    "bytes_loaded",
    "bytes_stored",
    "flops",
    "vectorized",
    "extent",
    "grain",
)
