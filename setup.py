"""Builds native code into the package, so that no program waits for that; the rest stands in pyproject.toml.

It is the runtime, and what kernels share for each instruction set. Where there is no compiler the package is installed
without them, and the programs that need them build them.
"""

import os
import runpy
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("pellucid/native")
SOURCE = runpy.run_path(str(Path(__file__).parent / NATIVE / "sources.py"))
COMPILER = shlex.split(os.environ.get("CXX", "g++"))


class BuildNative(build_ext):
    """Makes files whose names tell what they were made of."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        made = SOURCE["library_name"](name, SOURCE["FILES"]) if name == "runtime" else SOURCE["shared_name"](name)
        return os.path.join(*package, made)

    def build_extension(self, ext: Extension) -> None:
        made = Path(self.get_ext_fullpath(ext.name))
        made.parent.mkdir(parents=True, exist_ok=True)
        name = ext.name.rpartition(".")[2]
        with tempfile.TemporaryDirectory() as work:
            whole = Path(work) / made.name
            if name == "runtime":
                build_runtime(Path(work), whole)
            else:
                build_shared(name, Path(work), whole)
            shutil.copy(whole, made)


def build_runtime(work: Path, made: Path) -> None:
    """Make the library; `work` is a directory for what it takes."""
    stub = str(work / SOURCE["STUB"])
    run(*SOURCE["STUB_FLAGS"], "-o", stub)
    run("-shared", *SOURCE["FLAGS"], str(NATIVE / SOURCE["FILES"][0]), *SOURCE["linked_to"](stub), "-o", str(made))


def build_shared(level: str, work: Path, made: Path) -> None:
    """Make the object file of what kernels share for one of `LEVELS`."""
    source = work / "shared.cpp"
    source.write_text(SOURCE["shared_source"]("all"), encoding="utf-8")
    flags = (*SOURCE["KERNEL_FLAGS"], *SOURCE["LEVELS"][level])
    run(*flags, "-I", str(NATIVE), "-c", str(source), "-o", str(made))


def run(*arguments: str) -> None:
    """Run the compiler. Raises CompileError."""
    try:
        subprocess.run([*COMPILER, *arguments], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"native code is not built: {error}") from error


setup(
    ext_modules=[
        Extension(f"pellucid.native.{name}", [str(NATIVE / source)], optional=True)
        for name, source in {"runtime": "runtime.cpp", **dict.fromkeys(SOURCE["LEVELS"], "prelude.h")}.items()
    ],
    cmdclass={"build_ext": BuildNative},
)
