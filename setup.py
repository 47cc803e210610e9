"""Builds the native runtime into the package, so that no program waits for that; the rest stands in pyproject.toml.

Where there is no compiler the package is installed without it, and the first program that is compiled builds it.
"""

import os
import runpy
import shlex
import subprocess
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCE = runpy.run_path(str(Path(__file__).parent / "pellucid/native/runtime_source.py"))
COMPILER = shlex.split(os.environ.get("CXX", "g++"))


class BuildRuntime(build_ext):
    """Compiles the runtime to a library whose name tells what it was made of."""

    def get_ext_filename(self, fullname: str) -> str:
        name = SOURCE["library_name"]("runtime", SOURCE["FILES"])
        return os.path.join(*fullname.split(".")[:-1], name)

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            stub = os.path.join(work, SOURCE["STUB"])
            run(*SOURCE["STUB_FLAGS"], "-o", stub)
            run("-shared", *SOURCE["FLAGS"], *ext.sources, *SOURCE["linked_to"](stub), "-o", str(library))


def run(*arguments: str) -> None:
    """Run the compiler. Raises CompileError."""
    try:
        subprocess.run([*COMPILER, *arguments], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"the native runtime is not built: {error}") from error


setup(
    ext_modules=[Extension("pellucid.native.runtime", ["pellucid/native/runtime.cpp"], optional=True)],
    cmdclass={"build_ext": BuildRuntime},
)
