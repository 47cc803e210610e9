"""The programs that the kit inspects: a function or module, and its arguments."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pellucid.errors import PellucidError, UserError, near
from pellucid.kit.process.child import failure_of, not_judged
from pellucid.trace.schema import PROFILE, RUN

_FORM = (
    "give FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs), the folder of a run, or "
    "-- python SCRIPT.py"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A program: `fn(*args, **kwargs)`. fn: a function or an `nn.Module`."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Case:
        """The program `fn(*args, **kwargs)` under the name of `fn`. Raises UserError if args is no tuple or list."""
        if not isinstance(args, tuple | list):
            what = f"args must be a tuple or list, not {type(args).__name__}"
            raise UserError(what, hint="give (x,) for one tensor x")
        return cls(getattr(fn, "__name__", type(fn).__name__), fn, tuple(args), dict(kwargs or {}))

    def fresh(self) -> Case:
        """The same program on copies of its tensors and modules, so that a run leaves the original unchanged."""
        fn = copy.deepcopy(self.fn) if isinstance(self.fn, torch.nn.Module) else self.fn
        args, kwargs = copied((self.args, dict(self.kwargs)))
        return Case(self.name, fn, args, kwargs)

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)


def copied(tree: Any) -> Any:
    """Copies of all tensors of a tree, with their strides; tensors that share memory also share it in the copy."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.device.type != "cpu":
            return copy.deepcopy(leaf) if isinstance(leaf, torch.Tensor) else leaf
        storage = leaf.untyped_storage()
        key = storage.data_ptr() or id(leaf)
        if key not in storages:
            storages[key] = storage.clone()
        with torch.no_grad():
            made = torch.empty(0, dtype=leaf.dtype).set_(
                storages[key], leaf.storage_offset(), leaf.shape, leaf.stride()
            )  # type: ignore[call-overload]
        made = made.conj() if leaf.is_conj() else made
        made = torch.ops.aten._neg_view.default(made) if leaf.is_neg() else made
        return made.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy_of, tree)


def load_case(target: str) -> Case:
    """The program that `FILE.py:NAME` names. Raises UserError if there is none, NotJudged if NAME() fails."""
    make = load_case_file(target)
    torch.manual_seed(0)  # so that another process draws the same numbers
    with _failing(f"{target}, which creates the program, fails", target):
        made = make()
    return case_of(made, target)


def load_case_file(target: str) -> Callable[[], Any]:
    """The function that `FILE.py:NAME` names, which returns a program.

    Raises UserError if there is none, NotJudged if the file cannot be imported.
    """
    file, colon, name = target.rpartition(":")
    path = Path(file)
    for folder in filter(None, (target, file)):
        if Path(folder).is_dir():
            raise no_run(Path(folder))
    if Path(target).is_file():
        hint = f"give {target}:NAME, a function of it, or -- python {target}, to run it as a script"
        raise UserError(f"{target!r} is a file, not a program", hint=hint)
    if not colon or not name.isidentifier():
        raise UserError(f"{target!r} is not a program", hint=_FORM)
    if not path.is_file():
        raise UserError(f"there is no file {file}", hint=_FORM)
    with _failing(f"{file} cannot be imported", f"importing {file}"):
        module = _module(path)
    make = getattr(module, name, None)
    if not callable(make):
        callables = [each for each, value in vars(module).items() if callable(value)]
        raise UserError(f"{file} has no function {name}", hint=near(name, callables) or _FORM)
    if needed := _needed(make):
        raise UserError(f"{target} cannot be called without {', '.join(needed)}", hint=_FORM)
    return make


def _needed(make: Callable[..., Any]) -> list[str]:
    """The parameters that a call must pass."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # a builtin without a signature
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


def no_run(folder: Path) -> UserError:
    """The error to raise for a folder that should be a run but is not."""
    if (folder / PROFILE).is_file():
        what = f"{folder} is a profile, written by `pellucid profile -o`, and not a run: it has no graphs"
    elif folder.is_dir():
        what = f"{folder} is not a run: it has no {RUN}"
    else:
        what = f"there is no folder {folder}"
    return UserError(what, hint="`pellucid capture TARGET -o RUN` creates a run")


@contextmanager
def _failing(what: str, doing: str) -> Iterator[None]:
    """Raise NotJudged if the user's code fails, or ends the process, before there is a program."""
    try:
        yield
    except PellucidError:
        raise
    except SystemExit as end:
        ended = RuntimeError(f"{doing} ended with sys.exit({end.code!r})")
        raise not_judged(what, failure_of(ended.with_traceback(end.__traceback__))) from end
    except Exception as error:
        raise not_judged(what, failure_of(error)) from error


def case_of(made: Any, name: str) -> Case:
    """A program from `(fn, args)` or `(fn, args, kwargs)`. Raises UserError for anything else."""
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else ()
    if len(parts) not in (2, 3) or not callable(parts[0]) or not isinstance(parts[1], tuple | list):
        what = ", ".join(type(part).__name__ for part in parts) if parts else type(made).__name__
        raise UserError(
            f"{name} returned ({what}), not (fn, args) or (fn, args, kwargs) with a tuple or list of args", hint=_FORM
        )
    kwargs = parts[2] if len(parts) == 3 else {}
    if not isinstance(kwargs, Mapping):
        raise UserError(f"{name} returned {type(kwargs).__name__} for kwargs, which must be a dict", hint=_FORM)
    return Case(name, parts[0], tuple(parts[1]), dict(kwargs))


def _module(path: Path) -> Any:
    """The module in `path`, imported once, with its folder on the search path as for `python path`."""
    name = f"pellucid_target_{path.stem}_{abs(hash(path.resolve())):x}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
