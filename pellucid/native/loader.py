"""Load the native runtime, build it if needed, and check its assumptions.

The runtime handles tensors without Python's or ATen's headers. What it assumes about this Python and this PyTorch
instead is all in this file, and is checked once, before it is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.autograd.profiler

from pellucid.errors import InternalError, ToolchainError, UnsupportedError
from pellucid.machine.kernels import sizes_text
from pellucid.native.build import default_store, default_toolchain
from pellucid.native.compiler import Compiler
from pellucid.native.cpu import cpu
from pellucid.native.library import open_library
from pellucid.native.session import SESSION
from pellucid.native.sources import FILES, FLAGS, SOURCES, library_name
from pellucid.native.toolchain import Toolchain
from pellucid.native.words import words_header

_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"  # PyObject* THPVariable_Wrap(const at::TensorBase&)
_VERSION = "_ZNK2at10TensorBase8_versionEv"  # int64_t at::TensorBase::_version() const
_HINT = "Pellucid works with PyTorch 2.13; please report this with the output of `python -m torch.utils.collect_env`"
_aoti: Any = getattr(torch._C, "_aoti")  # noqa: B009 (unknown to torch's type stubs)


class _Host(ctypes.Structure):
    """`Host` in host.h."""

    _fields_ = [
        ("type_offset", ctypes.c_int64),
        ("impl_offset", ctypes.c_int64),
        ("storage_offset", ctypes.c_int64),
        ("tensor_type", ctypes.py_object),
        ("parameter_type", ctypes.py_object),
        ("wrap", ctypes.c_void_p),
        ("steal", ctypes.py_object),
        ("outside_inference", ctypes.py_object),
        ("profiler_globals", ctypes.py_object),
        ("profiler_flag", ctypes.py_object),
        ("version", ctypes.c_void_p),
    ]


def library() -> ctypes.PyDLL:
    """The runtime, ready to use; built and loaded at the first call. Raises ToolchainError or UnsupportedError."""
    with SESSION.lock:
        return _library()


@lru_cache(maxsize=1)
def _library() -> ctypes.PyDLL:
    lib = _open()
    lib.pellucid_instance.restype = ctypes.py_object
    lib.pellucid_instance.argtypes = [ctypes.c_void_p]
    lib.pellucid_fill.restype = ctypes.c_char_p
    lib.pellucid_fill.argtypes = [ctypes.c_void_p]
    lib.pellucid_pool_stats.argtypes = [ctypes.c_void_p]
    lib.pellucid_pool_stats.restype = None
    lib.pellucid_pool_trim.argtypes = [ctypes.c_int64]
    lib.pellucid_pool_trim.restype = ctypes.c_int64
    lib.pellucid_pool_limit.argtypes = [ctypes.c_int64]
    lib.pellucid_pool_limit.restype = None
    lib.pellucid_timeline_start.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    lib.pellucid_counters_error.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    lib.pellucid_counters_error.restype = ctypes.c_int64
    lib.pellucid_timeline_start.restype = None
    lib.pellucid_timeline_stop.argtypes = [ctypes.POINTER(ctypes.c_int64)]
    lib.pellucid_timeline_stop.restype = ctypes.c_void_p
    lib.pellucid_contended.argtypes = []
    lib.pellucid_contended.restype = ctypes.c_bool
    lib.pellucid_fingerprint.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 4]
    lib.pellucid_fingerprint.restype = ctypes.c_uint64
    lib.pellucid_every_fingerprint.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    lib.pellucid_every_fingerprint.restype = None
    lib.pellucid_unchanged.argtypes = [ctypes.py_object, *[ctypes.c_void_p] * 3]
    lib.pellucid_unchanged.restype = ctypes.c_bool
    lib.pellucid_layout_hash.argtypes = [ctypes.py_object]
    lib.pellucid_layout_hash.restype = ctypes.c_uint64
    lib.pellucid_draw.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_uint64]
    lib.pellucid_draw.restype = None
    lib.pellucid_flush_denormals.argtypes = [ctypes.c_bool]
    lib.pellucid_flush_denormals.restype = None
    lib.pellucid_init.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    lib.pellucid_init.restype = None
    host = _host(lib)
    SESSION.borrowed.append(host)  # the runtime borrows the objects in it
    lib.pellucid_init(ctypes.byref(host), default_pool_limit())
    return lib


def default_pool_limit() -> int:
    """Bytes that the output pool may cache: 1/8 of the memory this process may use, at least 256 MB."""
    return max(256 << 20, cpu().memory // 8)


# ----------------------------------------------------------------------------------------------- building


def _open() -> ctypes.PyDLL:
    """Load the runtime of the package; build another one if that is outdated or for another system."""
    for name, text in (("words.h", words_header()), ("sizes.h", sizes_text())):
        if (SOURCES / name).read_text(encoding="utf-8") != text:
            raise InternalError(f"native/{name} is outdated: run `pytest tests/golden --bless`")
    if came_with_package():
        with suppress(ToolchainError):
            return _load(_packaged())
    return _load(built("runtime", FILES, lambda _: FLAGS, "the native runtime does not compile", _HINT))


def came_with_package() -> bool:
    """Whether the package has a runtime that was built from the current sources."""
    return _packaged().exists()


def _packaged() -> Path:
    return SOURCES / library_name("runtime", FILES)


def built(stem: str, files: tuple[str, ...], flags: Callable[[Toolchain], Sequence[str]], what: str, hint: str) -> Path:
    """The library `stem` in the store, compiled from the first of `files` in this folder; it includes the others.

    what: the error message if it does not compile. Raises ToolchainError.
    """
    compiler = Compiler(default_toolchain(), default_store())

    def make(target: Path) -> None:
        compiler.link(SOURCES / files[0], target, *flags(compiler.toolchain))

    return compiler.provide(library_name(stem, files), make, what, hint)


def _load(path: Path) -> ctypes.PyDLL:
    try:
        return open_library(path, ctypes.PyDLL)
    except OSError as error:
        raise ToolchainError(
            f"the native runtime cannot be loaded: {error}", hint=_HINT, context={"library": path}
        ) from error


# ------------------------------------------------------------------------------------- facts about torch


def _host(lib: ctypes.PyDLL) -> _Host:
    _check_handle()
    samples = [torch.ones(2), torch.nn.Parameter(torch.ones(1)), torch.zeros(0, dtype=torch.int64)]
    return _Host(
        type_offset=_offset("type", samples, id, lambda tensor: id(type(tensor))),
        impl_offset=_offset("TensorImpl", samples, id, _implementation),
        storage_offset=_offset("StorageImpl", samples, _implementation, lambda tensor: tensor.untyped_storage()._cdata),
        tensor_type=torch.Tensor,
        parameter_type=torch.nn.Parameter,
        wrap=_wrapper(),
        steal=_aoti.alloc_tensors_by_stealing_from_void_ptrs,
        outside_inference=_fill_outside_inference(lib),
        profiler_globals=vars(torch.autograd.profiler),
        profiler_flag="_is_profiler_enabled",
        version=_version_counter(),
    )


def _implementation(tensor: torch.Tensor) -> int:
    return tensor._cdata


def _offset(
    what: str,
    samples: list[torch.Tensor],
    start: Callable[[torch.Tensor], int],
    value: Callable[[torch.Tensor], int],
) -> int:
    """The offset in bytes from `start` of a tensor to the pointer that equals its `value`."""
    word = ctypes.sizeof(ctypes.c_void_p)
    for offset in range(0, 8 * word, word):
        if all(ctypes.c_uint64.from_address(start(tensor) + offset).value == value(tensor) for tensor in samples):
            return offset
    raise UnsupportedError(f"tensors of PyTorch {torch.__version__} have no {what} pointer", hint=_HINT)


def _check_handle() -> None:
    """Check that a handle of PyTorch's C interface points to a TensorImpl pointer: the runtime creates such handles."""
    tensor = torch.ones(2)
    capsule = _aoti.unsafe_alloc_void_ptr_from_tensor(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    handle = pointer(capsule, None)
    good = bool(handle) and ctypes.c_uint64.from_address(handle).value == tensor._cdata
    # Frees the handle; the function for a single tensor would leak a reference to it.
    _aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule])
    if not good:
        raise UnsupportedError(f"a tensor handle of PyTorch {torch.__version__} is not a pointer", hint=_HINT)


def _wrapper() -> int | None:
    """Address of the C++ function that creates a Python tensor, or None: then a slower public one is used."""
    try:
        lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
        return ctypes.cast(getattr(lib, _WRAP), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _version_counter() -> int:
    """Address of the C++ function that returns the version counter of a tensor."""
    tensor = torch.ones(2)
    tensor.add_(1)
    version = getattr(_torch_cpu(), _VERSION, None)
    if version is None:
        raise UnsupportedError(f"PyTorch {torch.__version__} has no known function for version counters", hint=_HINT)
    version.restype, version.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    if version(ctypes.byref(ctypes.c_void_p(tensor._cdata))) != tensor._version:
        raise UnsupportedError(f"PyTorch {torch.__version__} has another layout of version counters", hint=_HINT)
    address = ctypes.cast(version, ctypes.c_void_p).value
    assert address is not None
    return address


def _fill_outside_inference(lib: ctypes.PyDLL) -> Callable[[object], None]:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer

    def fill(capsule: object) -> None:
        with torch.inference_mode(False):
            error = lib.pellucid_fill(pointer(capsule, None))
        if error:
            raise RuntimeError(error.decode(errors="replace"))

    return fill


@lru_cache(maxsize=64)
def dtype_code(dtype: torch.dtype) -> int:
    """The number by which PyTorch's C interface knows an element type."""
    torch_cpu = _torch_cpu()
    code = ctypes.c_int32()
    impl = ctypes.c_void_p(torch.empty(0, dtype=dtype)._cdata)
    if torch_cpu.aoti_torch_get_dtype(ctypes.byref(impl), ctypes.byref(code)):
        raise UnsupportedError(f"element type {dtype} is unknown to PyTorch's C interface")
    return code.value


def layout_code(layout: torch.layout) -> int:
    """The number of a layout; only strided tensors are supported."""
    if layout is not torch.strided:
        raise UnsupportedError(f"layout {layout} is not supported")
    return int(_torch_cpu().aoti_torch_layout_strided())


def memory_format_code(memory_format: torch.memory_format) -> int:
    """The number of a memory format."""
    return int(getattr(_torch_cpu(), f"aoti_torch_memory_format_{str(memory_format).removeprefix('torch.')}")())


@lru_cache(maxsize=1)
def _torch_cpu() -> ctypes.CDLL:
    return ctypes.CDLL("libtorch_cpu.so")  # already loaded: this only finds it
