"""Exported programs under TorchInductor, which compiles them ahead of time, without Dynamo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._inductor import aoti_compile_and_package, aoti_load_package


def compile_exported(program: torch.export.ExportedProgram, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The program as a compiled function. options: Inductor's. Raises what Inductor raises."""
    with tempfile.TemporaryDirectory(prefix="pellucid-aoti-") as folder:
        file = str(Path(folder) / "program.pt2")
        return aoti_load_package(aoti_compile_and_package(program, package_path=file, inductor_configs=dict(options)))
