"""The results of a benchmark: frozen data with a lossless conversion to JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from pellucid.kit.stats import Summary
from pellucid.printing import plain

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Startup:
    """A fresh process that ran one call: time in seconds, resident memory in bytes.

    `seconds` is the time from torch.compile to the first result, after importing torch and building the model.
    `built_bytes` is the memory at the start of it, `peak_bytes` the peak until the end, without compilers in child
    processes. `failure`: why there are no figures.
    """

    seconds: float | None = None
    built_bytes: int | None = None
    peak_bytes: int | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class FallbackTime:
    """Calls of one operator that a compiled program leaves to ATen or Python, and why.

    `calls` per call of the program; `share` of its time, as measured by torch.profiler.
    """

    op: str
    reason: str
    calls: int
    share: float


@dataclass(frozen=True, slots=True)
class SubjectResult:
    """One backend on one model.

    `seconds` and `faults` are per call: wall time and minor page faults. `speedup` is eager's time over this
    one's, round by round. `first_seconds` is the first call in this process, with the existing caches; `cold` and
    `warm` are fresh processes with an empty cache, and with the cache of the cold one. `error` is
    e(x) = max |x - reference| / rms(reference) against float64, the worst over all outputs or gradients (None: the
    program does not run in float64); `accurate`: whether it is close to eager's (see `pellucid.kit.judge.accuracy`).
    `failure` is the exception that ended it. `kernels` were generated and `fallbacks` left to ATen, over all graphs;
    None where a backend does not report them. `fallback_times` lists the latter, the most expensive first; None unless
    requested and reported by the backend.
    """

    name: str
    failure: str | None = None
    seconds: Summary | None = None
    speedup: Summary | None = None
    faults: Summary | None = None
    first_seconds: float | None = None
    cold: Startup | None = None
    warm: Startup | None = None
    error: float | None = None
    accurate: bool | None = None
    kernels: int | None = None
    fallbacks: int | None = None
    fallback_times: tuple[FallbackTime, ...] | None = None

    @property
    def good(self) -> bool:
        """Whether it ran, also in fresh processes, and its results are right."""
        starts = [s for s in (self.cold, self.warm) if s is not None]
        return self.failure is None and self.accurate is not False and all(s.failure is None for s in starts)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the fresh process with warm caches, else of that with cold caches."""
        start = self.warm or self.cold
        return start.peak_bytes if start else None


@dataclass(frozen=True, slots=True)
class ModelResult:
    """All subjects on one program, measured side by side in `rounds` interleaved rounds."""

    model: str
    batch: int
    seq: int
    dtype: str
    rounds: int
    subjects: tuple[SubjectResult, ...]
    train: bool = False
    dynamic: bool = False

    def __str__(self) -> str:
        """The table that `pellucid bench` prints for it."""
        from pellucid.kit.bench.table import model_table  # imports this

        return plain(model_table(self))


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the versions of a measurement.

    `load` is the load average of the minute before: figures of a busy machine are unreliable.
    """

    pellucid: str
    torch: str
    python: str
    cpu: str
    cores: int
    threads: int
    load: float


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run of the benchmark."""

    schema: int
    environment: Environment
    models: tuple[ModelResult, ...]

    @property
    def good(self) -> bool:
        """Whether every subject is good on every model."""
        return all(s.good for m in self.models for s in m.subjects)

    def __str__(self) -> str:
        """What `pellucid bench` prints."""
        from pellucid.kit.bench.table import report_table  # imports this

        return plain(report_table(self))

    def to_json(self) -> str:
        """One JSON object. Numbers that are not finite are written as strings ("inf"): JSON has none."""
        return json.dumps(_encode(dataclasses.asdict(self)), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The inverse of `to_json`. Raises `ValueError` for another schema version."""
        data = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r} is unsupported: this version reads {SCHEMA}")
        return decode(cls, data)


def _encode(value: Any) -> Any:
    match value:
        case dict():
            return {k: _encode(v) for k, v in value.items()}
        case list() | tuple():
            return [_encode(v) for v in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def decode(kind: Any, value: Any) -> Any:
    """Rebuild a value of type `kind` (dataclass, tuple[X, ...], X | None, or plain) from decoded JSON."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(**{k: decode(hints[k], v) for k, v in value.items()})
    if typing.get_origin(kind) is tuple:
        return tuple(decode(typing.get_args(kind)[0], v) for v in value)
    if isinstance(kind, types.UnionType):
        return None if value is None else decode(typing.get_args(kind)[0], value)
    return kind(value)
