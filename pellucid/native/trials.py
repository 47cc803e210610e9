"""What trials have found out: which of several kernels is the fastest here, kept in the store for later processes.

    trials/<key>    {"kernels": ["k_sum_0c", "k_sum_1f"], "fastest": "k_sum_1f", "ns": [812, 640], "pairs": 3}

The key is made of the kernels' texts, the number of threads and the machine. An entry chooses between kernels that give
the same bits, so one that is damaged or made up can cost time and nothing else; what cannot be read is tried again.
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
"""The rule of the decisions that trials make."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial found out.

    kernels: C symbols, the cheapest by price first. fastest: one of them. ns: the median of each, in nanoseconds.
    pairs: of calls that were compared. here: whether this process tried them, else an earlier one did.
    """

    kernels: tuple[str, ...]
    fastest: str
    ns: tuple[int, ...]
    pairs: int
    here: bool = True


_numbers = itertools.count()
_all: WeakValueDictionary[int, Choices] = WeakValueDictionary()


def variants() -> list[Decision]:
    """Of the programs of this process that are alive, the kernels that can run in several variants, and which does."""
    return [decision for _, choices in sorted(_all.items()) for decision in choices.decisions]


class Choices:
    """Of a program's kernels that can run in several variants, which of them run.

    tell: is called with each decision that is made from now on.
    """

    def __init__(self) -> None:
        _all[next(_numbers)] = self
        self.tell: Callable[[Decision], None] = lambda _: None
        self._nodes: dict[str, dict[str, None]] = {}  # by key, of IR kernels
        self._kernels: dict[str, tuple[str, ...]] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._trials: dict[str, Trial] = {}

    def of(self, node: str, sources: Mapping[str, str], variants: Sequence[Variant]) -> tuple[Variant, Trial | None]:
        """How an IR kernel is called: in the variant that is known to be the fastest, or else in all of them.

        sources: C++ by symbol, the cheapest by price first. variants: in the same order.
        """
        key = trial_key(sources)
        kernels = self._kernels[key] = tuple(sources)
        self._nodes.setdefault(key, {})[node] = None
        if key not in self._outcomes and key not in self._trials:
            found = recall(key, kernels)
            if found is None:
                self._trials[key] = Trial(tuple(variants), torch.get_num_threads(), partial(self._settled, key))
            else:
                self._decide(key, found)
        outcome = self._outcomes.get(key)
        return (variants[0], self._trials[key]) if outcome is None else (variants[kernels.index(outcome.fastest)], None)

    @property
    def settled(self) -> int:
        """How many of them are decided."""
        return len(self._outcomes)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One for each kernel, also for those that are still tried."""
        return tuple(map(self._told, self._kernels))

    def _settled(self, key: str, said: Sequence[int]) -> None:
        fastest, pairs, *ns = said
        kernels = self._kernels[key]
        outcome = Outcome(kernels, kernels[fastest], tuple(ns), pairs)
        keep(key, outcome)
        self._decide(key, outcome)

    def _decide(self, key: str, outcome: Outcome) -> None:
        self._outcomes[key] = outcome
        self.tell(self._told(key))

    def _told(self, key: str) -> Decision:
        return told(tuple(self._nodes[key]), self._kernels[key], self._outcomes.get(key))


def trial_key(sources: Mapping[str, str]) -> str:
    """Under which a trial of kernels, by name and text, is kept, with as many threads as now."""
    about = [machine_file().name, torch.get_num_threads(), *((name, text_hash(text)) for name, text in sources.items())]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:40]


def recall(key: str, kernels: tuple[str, ...]) -> Outcome | None:
    """What an earlier process found out of these kernels; None if nothing, or if it cannot be read."""
    return next(filter(None, (parse(data, kernels) for data in default_store().trials(key))), None)


def parse(data: bytes, kernels: tuple[str, ...] | None = None) -> Outcome | None:
    """An entry of the store, if it is whole and about `kernels`."""
    said = json_object(data)
    names, fastest, ns, pairs = (said.get(name) for name in ("kernels", "fastest", "ns", "pairs"))
    if not isinstance(names, list) or not isinstance(ns, list) or not isinstance(pairs, int):
        return None
    if len(ns) != len(names) or not all(isinstance(each, int) for each in ns) or fastest not in names:
        return None
    if kernels is not None and tuple(names) != kernels:
        return None
    return Outcome(tuple(map(str, names)), str(fastest), tuple(ns), pairs, here=False)


def keep(key: str, outcome: Outcome) -> None:
    """Let later processes know, if there is room."""
    said = {"kernels": outcome.kernels, "fastest": outcome.fastest, "ns": outcome.ns, "pairs": outcome.pairs}
    default_store().add_trial(key, json.dumps(said).encode())


def told(nodes: tuple[str, ...], kernels: tuple[str, ...], outcome: Outcome | None) -> Decision:
    """The decision about IR kernels that can run in several variants; None: it is not made yet."""
    facts = (("kernels", " ".join(kernels)),)
    if outcome is None:
        why = f"{len(kernels)} kernels are being tried: the first calls find out which is the fastest"
        return Decision(VARIANT, nodes, False, why, facts)
    times = ", ".join(f"{name} {ns / 1000:.4g} us" for name, ns in zip(outcome.kernels, outcome.ns, strict=True))
    who = "" if outcome.here else ", as an earlier process found out"
    why = f"{outcome.fastest} is the fastest of {len(outcome.kernels)}{who}: {times}"
    return Decision(VARIANT, nodes, True, why, (*facts, ("fastest", outcome.fastest), ("pairs", outcome.pairs)))
