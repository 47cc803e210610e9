"""The files of a run folder and the columns of its tables: the interface for everything that reads runs.

A run contains the graphs of a program. The compiler writes one for each graph that it compiles
(`options={"trace": DIR}`), `pellucid capture` one for a whole program, under any backend; every command of the kit
accepts either as its TARGET.
"""

from __future__ import annotations

VERSION = 3
"""Incremented whenever the meaning of a file or a column changes."""

RUN, GRAPHS, TENSORS = "run.json", "graphs", "tensors"
GRAPH, VALUES, NUMBERS = "graph.json", "values.json", "numbers.json"
USER_SOURCE = "user_source.json"
PROFILE = "profile.json"
"""Also in other folders that were passed to `pellucid profile -o`."""

FILES: dict[str, str] = {
    RUN: "environment, backend and options; for each graph its stages with their times, counts, and how it ended",
    GRAPHS: "a folder for each graph, see below",
    "kernels": "the C++ of each different kernel, annotated with FX nodes and your source lines",
    "kernels.csv": "one row per kernel and library call: operators, sizes, bytes, seconds as far as they are known",
    "decisions.csv": "every choice of the compiler with its reason: fusions, vectorisation, fallbacks",
    USER_SOURCE: "the lines of your program that the graphs come from, with some lines around each, by file and number",
    TENSORS: "the bytes of inputs, constants and results, each stored once",
    "check.json": "and so on for each command that was run with -o: its result",
    "cosim.csv": "every result that cosimulation compared",
    "report.html": "all of it on one page, from report; with `profile.json`, `machine.json`, `trace.json` and others",
    "repro.py": "the smallest program that fails, from minify: running it executes its code",
}
"""The files of a run, by name."""

GRAPH_FILES: dict[str, str] = {
    "fx_graph_readable.py": "the captured FX graph with shapes and your source lines, for reading",
    "fx_graph_runnable.py": "the captured FX graph as a program: runs it eagerly and compiled, compares and measures",
    "fx_graph_transformed.py": "the FX graph after the backend's own FX passes, as a program",
    "ir_pre_fusion.txt": "the backend's loops, one for each operator",
    "ir_post_fusion.txt": "its loops after fusion: what is compiled",
    "loops.txt": "the loop nest of each kernel: order, blocks, vectors, distribution over threads; its C++ follows it",
    "ir_frozen.txt": "with the option `freeze`: the loops that depend only on parameters, run before the first call",
    "execution_plan.txt": "where each buffer of a call is stored, and the calls of kernels and operators in order",
    "output_code.py": "the calls that a compiled graph makes, with its C++ kernels, as a program to edit and run",
    "segments.txt": "for a graph that is split into several programs: its segments, and Python's calls between them",
    "provenance.json": "from each C++ line to IR line, FX nodes and source lines, and back",
    GRAPH: "the captured graph as data, which the kit reads: operators by name",
    VALUES: "the arguments of the first call (up to 1 GiB), and the constants, with which the programs here run",
    NUMBERS: "what the graph returned, eagerly and compiled, and intermediate results if requested",
}
"""The files of a graph's folder, by name. Those of a failed stage, or that a backend does not provide, are missing."""

TABLES: dict[str, tuple[str, ...]] = {
    "kernels.csv": (
        "graph",
        "kernel",
        "symbol",
        "op",
        "position",
        "fx_nodes",
        "user_lines",
        "ir_ops",
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
        "seconds",
    ),
    "decisions.csv": ("graph", "rule", "subject", "ok", "why", "facts", "fx_nodes", "user_lines"),
}
"""The columns of each table, by name; unknown values are empty. symbol: of a kernel; op: of a library call."""
