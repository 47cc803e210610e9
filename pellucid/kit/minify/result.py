"""What a search for a smaller failure says, on its way and in the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from pellucid.kit.debug.user_program import Faulty
from pellucid.kit.minify.trial import GOOD, Kind
from pellucid.kit.shown import Shown


@dataclass(frozen=True, slots=True)
class Shrunk:
    """How far the search is. step: what it does. nodes: calls that are left."""

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
    """kind: of failure. graph: its text. repro: the standalone program; shown: whether it was seen to fail so.
    changes: what was done to the inputs. others: failures of another kind that were met on the way, and not followed.
    finished: whether the search came to its end within its budget. times: seconds by step. before: what is wrong
    before the graphs, where these are right; then nodes are counted in the graphs of the program, and `graph` is empty.
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
