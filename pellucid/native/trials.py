"""Results of trials: which of several variants of a kernel is the fastest here, stored for later processes.

    trials/<key>    {"kernels": ["k_sum_0c", "k_sum_1f"], "fastest": "k_sum_1f", "ns": [812, 640], "pairs": 3}

The key is a hash of the kernels' texts, the number of threads and the machine. Entries choose between kernels with
bitwise equal results, so a damaged or forged one can only cost time; one that cannot be read is measured again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch

from pellucid.ir.decision import Decision
from pellucid.native.build import default_store
from pellucid.native.instance import Trial, Variant
from pellucid.native.machine import machine_file
from pellucid.native.store import json_object, text_hash

VARIANT = "run.variant"
"""The rule of the decisions of trials."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial.

    kernels: C symbols, the cheapest by estimated cost first. fastest: one of them. ns: their median times.
    pairs: how many pairs of calls were compared. here: measured by this process, not by an earlier one.
    """

    kernels: tuple[str, ...]
    fastest: str
    ns: tuple[int, ...]
    pairs: int
    here: bool = True


_numbers = itertools.count()
_all: WeakValueDictionary[int, Choices] = WeakValueDictionary()


def variants() -> list[Decision]:
    """The decisions about all kernels with variants, of the live programs of this process."""
    return [decision for _, choices in sorted(_all.items()) for decision in choices.decisions]


class Choices:
    """Selects the variants of a program's kernels.

    report: called with each later decision.
    """

    def __init__(self) -> None:
        _all[next(_numbers)] = self
        self.report: Callable[[Decision], None] = lambda _: None
        self._nodes: dict[str, dict[str, None]] = {}  # by key, of IR kernels
        self._kernels: dict[str, tuple[str, ...]] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._trials: dict[str, Trial] = {}

    def of(self, node: str, sources: Mapping[str, str], variants: Sequence[Variant]) -> tuple[Variant, Trial | None]:
        """The variant for an IR kernel: the fastest if that is known, else the first one and a trial of all.

        sources: C++ by symbol, the cheapest by estimated cost first. variants: in the same order.
        """
        key = trial_key(sources)
        kernels = self._kernels[key] = tuple(sources)
        self._nodes.setdefault(key, {})[node] = None
        if key not in self._outcomes and key not in self._trials:
            known = recall(key, kernels)
            if known is None:
                self._trials[key] = Trial(tuple(variants), torch.get_num_threads(), partial(self._settled, key))
            else:
                self._decide(key, known)
        outcome = self._outcomes.get(key)
        if outcome is None:
            return variants[0], self._trials[key]
        return variants[kernels.index(outcome.fastest)], None

    @property
    def settled(self) -> int:
        """How many trials have ended."""
        return len(self._outcomes)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One for each kernel, also for those whose trials go on."""
        return tuple(map(self._decision, self._kernels))

    def _settled(self, key: str, result: Sequence[int]) -> None:
        fastest, pairs, *ns = result
        kernels = self._kernels[key]
        outcome = Outcome(kernels, kernels[fastest], tuple(ns), pairs)
        keep(key, outcome)
        self._decide(key, outcome)

    def _decide(self, key: str, outcome: Outcome) -> None:
        self._outcomes[key] = outcome
        self.report(self._decision(key))

    def _decision(self, key: str) -> Decision:
        return decision_of(tuple(self._nodes[key]), self._kernels[key], self._outcomes.get(key))


def trial_key(sources: Mapping[str, str]) -> str:
    """The store's key for a trial of kernels, by name and text, with the current number of threads."""
    about = [machine_file().name, torch.get_num_threads(), *((name, text_hash(text)) for name, text in sources.items())]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:40]


def recall(key: str, kernels: tuple[str, ...]) -> Outcome | None:
    """The outcome that an earlier process stored for these kernels; None if there is none that can be read."""
    return next(filter(None, (parse(data, kernels) for data in default_store().trials(key))), None)


def parse(data: bytes, kernels: tuple[str, ...] | None = None) -> Outcome | None:
    """An entry of the store, if it is complete and about `kernels`."""
    entry = json_object(data)
    names, fastest, ns, pairs = (entry.get(name) for name in ("kernels", "fastest", "ns", "pairs"))
    if not isinstance(names, list) or not isinstance(ns, list) or not isinstance(pairs, int):
        return None
    if len(ns) != len(names) or not all(isinstance(each, int) for each in ns) or fastest not in names:
        return None
    if kernels is not None and tuple(names) != kernels:
        return None
    return Outcome(tuple(map(str, names)), str(fastest), tuple(ns), pairs, here=False)


def keep(key: str, outcome: Outcome) -> None:
    """Store an outcome for later processes, if there is space."""
    entry = {"kernels": outcome.kernels, "fastest": outcome.fastest, "ns": outcome.ns, "pairs": outcome.pairs}
    default_store().add_trial(key, json.dumps(entry).encode())


def decision_of(nodes: tuple[str, ...], kernels: tuple[str, ...], outcome: Outcome | None) -> Decision:
    """The decision about IR kernels with variants. outcome: None while the trial goes on."""
    facts = (("kernels", " ".join(kernels)),)
    if outcome is None:
        why = f"{len(kernels)} kernels are being tried: the first calls find out which is the fastest"
        return Decision(VARIANT, nodes, False, why, facts)
    times = ", ".join(f"{name} {ns / 1000:.4g} us" for name, ns in zip(outcome.kernels, outcome.ns, strict=True))
    source = "" if outcome.here else ", as an earlier process found out"
    why = f"{outcome.fastest} is the fastest of {len(outcome.kernels)}{source}: {times}"
    return Decision(VARIANT, nodes, True, why, (*facts, ("fastest", outcome.fastest), ("pairs", outcome.pairs)))
