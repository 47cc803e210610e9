"""PyTorch's own operator database against eager.

    python -m tests.operators.sweep [--engine native|dynamic|interpreter] [--dtypes f32,...] [--share K/N] [OP ...]

For every operator and dtype, three samples (first, middle, last) are run in eager mode, in float64 as the judge, and
compiled. With `--engine interpreter` the lowered IR is interpreted, which tests capture and lowering without any C++.
The rows go to a JSON file: `ok`, or why not.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "u8": torch.uint8,
    "bool": torch.bool,
}


# What these return is not defined.
UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


def samples(op: Any, dtype: torch.dtype) -> Iterator[tuple[int, Any]]:
    """The first, middle and last sample of an operator."""
    found = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    for position in sorted({0, len(found) // 2, len(found) - 1}) if found else ():
        yield position, found[position]


def call(function: Callable[..., Any], sample: Any) -> Any:
    return function(sample.input, *sample.args, **sample.kwargs)


def check(op: Any, sample: Any, compile_function: Callable[..., Any]) -> str:
    """`ok`, `skip: ...` where eager itself fails or is random, or what went wrong."""
    from tests.support import assert_matches, tensors, widened

    arguments = (sample.input, sample.args, sample.kwargs)

    def function(first: Any, args: Any, kwargs: Any) -> Any:
        return op(first, *args, **kwargs)

    try:
        torch.manual_seed(0)
        expected = function(*copy.deepcopy(arguments))
        torch.manual_seed(0)
        again = function(*copy.deepcopy(arguments))
    except Exception as error:
        return f"skip: eager raises {type(error).__name__}"
    if op.name in UNINITIALISED:
        return "skip: the result is uninitialised memory"
    if any(tensor.layout is not torch.strided for tensor in tensors(expected)):
        return "skip: the result is sparse"
    if not same(tensors(expected), tensors(again)):
        return "skip: eager is not deterministic"
    try:
        exact = function(*widened(copy.deepcopy(arguments)))
        if any(a.shape != b.shape for a, b in zip(tensors(exact), tensors(expected), strict=True)):
            exact = expected
    except Exception:
        exact = expected
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        actual = compile_function(function)(*copy.deepcopy(arguments))
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
    try:
        assert_matches(actual, expected, exact)
    except Exception as failure:
        return f"mismatch: {str(failure).splitlines()[0][:200]}"
    return "ok"


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Equal bit for bit, NaN included; tensors that cannot be compared count as equal."""
    try:
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    except Exception:
        return True
    return True


def run_operator(task: tuple[int, str, str]) -> list[dict[str, Any]]:
    """All samples of one operator and dtype, in a worker process."""
    from torch.testing._internal.common_methods_invocations import op_db

    position, dtype_name, engine = task
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    op, dtype, name = op_db[position], DTYPES[dtype_name], _name(position)
    rows: list[dict[str, Any]] = []
    try:
        found = list(samples(op, dtype))
    except Exception as error:
        return [{"op": name, "dtype": dtype_name, "sample": -1, "result": f"skip: no samples ({type(error).__name__})"}]
    for number, sample in found:
        with torch.no_grad():
            try:
                result = check(op, sample, ENGINES[engine])
            except Exception as error:
                result = f"harness: {type(error).__name__}: {str(error)[:200]}"
        rows.append({"op": name, "dtype": dtype_name, "sample": number, "result": result})
    return rows


def _name(position: int) -> str:
    from torch.testing._internal.common_methods_invocations import op_db

    op = op_db[position]
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _native(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="pellucid", options={"verify": True})


def _dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="pellucid", dynamic=True, options={"verify": True})


def _interpreter(function: Callable[..., Any]) -> Callable[..., Any]:
    from tests.support import interpreted

    return interpreted(function, [], fullgraph=False)


ENGINES: dict[str, Callable[..., Any]] = {"native": _native, "dynamic": _dynamic, "interpreter": _interpreter}


def tasks(names: list[str], dtypes: list[str], engine: str, share: tuple[int, int]) -> list[tuple[int, str, str]]:
    """Operators that support the dtype; `share` (k, n) keeps every n-th, from the k-th on."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = [
        (position, dtype, engine)
        for position, op in enumerate(op_db)
        for dtype in dtypes
        if (not names or op.name in names) and DTYPES[dtype] in op.supported_dtypes("cpu")
    ]
    return found[share[0] :: share[1]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="operators; all if none is named")
    parser.add_argument("--dtypes", default="f32", help=f"of {','.join(DTYPES)}")
    parser.add_argument("--engine", choices=ENGINES, default="native")
    parser.add_argument("--share", default="0/1", help="K/N: every N-th operator from the K-th on")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one operator and dtype")
    parser.add_argument("-o", "--output", help="JSON file of all rows")
    arguments = parser.parse_args()
    first, every = (int(part) for part in arguments.share.split("/"))
    todo = tasks(arguments.names, arguments.dtypes.split(","), arguments.engine, (first, every))
    rows = run_all(todo, arguments.jobs, arguments.timeout)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=0)
    return report(rows)


def run_all(todo: list[tuple[int, str, str]], jobs: int, timeout: float) -> list[dict[str, Any]]:
    """Run tasks in worker processes; a crash or a hang is a result, and the worker is replaced."""
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(jobs, maxtasksperchild=200)
    pending = [(task, pool.apply_async(run_operator, (task,))) for task in todo]
    for number, (task, handle) in enumerate(pending):
        try:
            rows += handle.get(timeout)
        except multiprocessing.TimeoutError:
            rows.append({"op": _name(task[0]), "dtype": task[1], "sample": -1, "result": "crash or timeout"})
        if sys.stderr.isatty() or number % 50 == 0:
            print(f"\r{number + 1}/{len(todo)}", end="", file=sys.stderr, flush=True)
    pool.terminate()
    return rows


def report(rows: list[dict[str, Any]]) -> int:
    """Print counts and failures; the exit status is 1 if anything failed."""
    failed = [row for row in rows if row["result"] != "ok" and not row["result"].startswith("skip")]
    counts = Counter("ok" if row["result"] == "ok" else row["result"].split(":")[0] for row in rows)
    for row in failed:
        print(f"{row['op']} {row['dtype']} #{row['sample']}: {row['result']}")
    accepted = sum(not row["result"].startswith("skip") for row in rows)
    print(f"{accepted - len(failed)} of {accepted} match; {dict(counts)}")
    return 1 if failed or not accepted else 0


if __name__ == "__main__":
    raise SystemExit(main())
