"""The progress and the result of a search for a smaller failure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pellucid.kit.debug.user_program import Faulty
from pellucid.kit.minify.trial import GOOD, Kind
from pellucid.kit.shown import Shown


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The progress of the search. step: what it is doing. nodes: the number of calls left."""

    graph: str
    step: str
    nodes_before: int
    nodes: int
    queries: int
    seconds: float

    def __str__(self) -> str:
        left = f"{self.nodes_before} -> {self.nodes} nodes" if self.nodes < self.nodes_before else f"{self.nodes} nodes"
        return f"{self.graph}: {left}, {self.queries} queries, {self.seconds:.0f} s: {self.step}"


@dataclass(frozen=True, slots=True)
class Minified(Shown):
    """kind: of failure. graph: its text. repro: the standalone program; shown: whether it was verified to fail so.
    changes: applied to the inputs. others: failures of other kinds that were found and not followed. finished: whether
    the search ended within its budget. times: seconds by step. before: the fault before the graphs, where these are
    right; then nodes are counted in the graphs of the program, and `graph` is empty.
    """

    backend: str
    kind: Kind
    nodes_before: int
    nodes_after: int
    queries: int
    seconds: float
    graph: str
    repro: str
    shown: bool = False
    changes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    finished: bool = True
    times: dict[str, float] = field(default_factory=dict)
    before: Faulty | None = None

    @property
    def good(self) -> bool:
        """Whether there was nothing to minify."""
        return self.kind == GOOD
