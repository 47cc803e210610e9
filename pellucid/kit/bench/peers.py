"""Other inference engines as subjects of a benchmark, each used as its documentation says, with its latency settings.

They only do inference, and are no backends of `torch.compile`: the program is converted once into a folder, for the
sizes that it is called with, and then takes its tensors by position. Next to other subjects an engine runs in a
separate process, which is stopped when it is not its turn: its idle threads spin, which made calls of eager take forty
times as long.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pellucid.errors import PellucidError, UserError
from pellucid.kit.bench.interleave import Slot, run_slot
from pellucid.kit.judge.accuracy import floating_type, tensors
from pellucid.kit.process.child import Failure, Worker
from pellucid.kit.programs.case import Case
from pellucid.kit.programs.graphs import case_in

Run: TypeAlias = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Converted:
    """A program converted to an engine's files. peer: the engine's name. settings: of the engine."""

    peer: str
    folder: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine. packages: that it needs. convert: writes a program into a folder, and returns the settings to run it.
    start: loads the written program, and returns a call of it on its tensors.
    """

    packages: tuple[str, ...]
    convert: Callable[[Case, Path], dict[str, Any]]
    start: Callable[[Converted, list[Tensor]], Run]


def check_installed(name: str) -> None:
    """Raises UserError for a peer whose packages are not installed."""
    missing = [each for each in PEERS[name].packages if find_spec(each) is None]
    if missing:
        raise UserError(f"{name} needs {' and '.join(missing)}", hint="pip install 'pellucid[peers]'")


def peer(name: str, case: Case, options: Mapping[str, Any]) -> Run:
    """A call of the program under an engine in this process; converting it takes seconds.

    options: of the engine. The call returns the tensors that the program returns, in order. Raises what the engine
    raises.
    """
    with tempfile.TemporaryDirectory(prefix="pellucid-peer-") as folder:
        return _start(_convert(name, case, options, Path(folder)))


class Engine:
    """An engine in a separate process, until it is closed. Raises `EngineError` if that process fails.

    A separate thread communicates with that process: until the engine is stopped, its threads keep the waiting thread
    off the cores, and Pellucid attributes the waiting time of a thread that calls it to other processes.
    """

    def __init__(self, name: str, case: Case, options: Mapping[str, Any]) -> None:
        self._worker = Worker()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        try:
            with tempfile.TemporaryDirectory(prefix="pellucid-peer-") as folder:
                self._ask(_begin, _convert(name, case, options, Path(folder)))
        except BaseException:
            self.close()
            raise

    def __call__(self) -> list[Tensor]:
        """Call the program."""
        return self._ask(_output)

    def slot(self, count: int) -> Slot:
        """Time `count` calls."""
        return self._ask(_slot, count)

    def close(self) -> None:
        """End the process."""
        self._worker.close()
        self._thread.shutdown()

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        found = self._thread.submit(self._answer, function, *args).result()
        if isinstance(found, Failure):
            raise EngineError(f"{found.what}: {' '.join(found.text.split())}")
        return found

    def _answer(self, function: Callable[..., Any], *args: Any) -> Any:
        found = self._worker.call(function, *args)
        self._worker.pause()
        return found


class EngineError(PellucidError):
    """An engine failed in its process."""

    code = "engine"


# ------------------------------------------------------------------------------------------------ in its process

_running: list[Run] = []


def _begin(converted: Converted) -> None:
    _running[:] = [_start(converted)]


def _output() -> list[Tensor]:
    return _running[0]()


def _slot(count: int) -> Slot:
    return run_slot(_running[0], count)


def _start(converted: Converted) -> Run:
    inputs = torch.load(converted.folder / _INPUTS, weights_only=True)
    with _quiet():
        return PEERS[converted.peer].start(converted, inputs)


# ------------------------------------------------------------------------------------------------ converting

_INPUTS = "inputs.pt"


def _convert(name: str, case: Case, options: Mapping[str, Any], folder: Path) -> Converted:
    with torch.no_grad(), _quiet():
        settings = PEERS[name].convert(case, folder)
    return Converted(name, folder, {**settings, **options})


class Positional(nn.Module):
    """A program as a module that takes only its tensors, in order; the other arguments are constants."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.fn = case.fn
        self._leaves, self._spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
        self._positions = [at for at, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the program is called with."""
        return tuple(self._leaves[at] for at in self._positions)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._leaves)
        for at, tensor in zip(self._positions, inputs, strict=True):
            leaves[at] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return tuple(tensors(self.fn(*args, **kwargs)))

    def save_inputs(self, folder: Path) -> None:
        """Save the tensors that the program is called with."""
        torch.save([tensor.clone() for tensor in self.inputs], folder / _INPUTS)


def _convert_for_openvino(case: Case, folder: Path) -> dict[str, Any]:
    """https://docs.openvino.ai: `convert_model` on the result of `torch.export`, which supports operators that a trace
    does not, then `compile_model` with the latency hint.

    A bfloat16 program is converted from float32, with bfloat16 as the inference precision.
    """
    openvino: Any = import_module("openvino")
    narrow = floating_type(case) is torch.bfloat16
    program = Positional(case_in(case, torch.float32) if narrow else case).eval()
    model = openvino.convert_model(torch.export.export(program, program.inputs))
    openvino.save_model(model, str(folder / "program.xml"), compress_to_fp16=False)
    program.save_inputs(folder)
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "bf16" if narrow else "f32",
    }


def _start_openvino(converted: Converted, inputs: list[Tensor]) -> Run:
    openvino: Any = import_module("openvino")
    model = openvino.Core().read_model(str(converted.folder / "program.xml"))
    compiled = openvino.compile_model(model, "CPU", dict(converted.settings))
    arrays = [tensor.numpy() for tensor in inputs]
    return lambda: [torch.from_numpy(each) for each in compiled(arrays).values()]


def _convert_for_onnxruntime(case: Case, folder: Path) -> dict[str, Any]:
    """https://onnxruntime.ai/docs: export by `torch.onnx.export`, and a session with PyTorch's number of threads."""
    program = Positional(case).eval()
    exported: Any = torch.onnx.export(program, program.inputs, dynamo=True, verbose=False)
    exported.save(str(folder / "program.onnx"), external_data=True)  # one file holds at most 2 GB
    program.save_inputs(folder)
    return {"intra_op_num_threads": torch.get_num_threads()}


def _start_onnxruntime(converted: Converted, inputs: list[Tensor]) -> Run:
    onnxruntime: Any = import_module("onnxruntime")
    settings = onnxruntime.SessionOptions()
    for name, value in converted.settings.items():
        if not hasattr(settings, name):
            raise UserError(f"onnxruntime's SessionOptions has no {name}")
        setattr(settings, name, value)
    file = str(converted.folder / "program.onnx")
    session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    arrays = {each.name: tensor.numpy() for each, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: [torch.from_numpy(each) for each in session.run(None, arrays)]


PEERS: Mapping[str, Peer] = {
    "openvino": Peer(("openvino",), _convert_for_openvino, _start_openvino),
    "onnxruntime": Peer(("onnxruntime", "onnx", "onnxscript"), _convert_for_onnxruntime, _start_onnxruntime),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress converters' warnings about code that is not the user's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
