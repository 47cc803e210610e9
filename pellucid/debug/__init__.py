"""The debugging kit: what is wrong with a compiled program, where, and the smallest proof.

Its tools work on any backend of `torch.compile`, through a `Subject`; they know most of Pellucid and of TorchInductor.
"""

from pellucid.debug.check import Checked, Culprit, check
from pellucid.debug.judge import Judgement, Output, Verdict

__all__ = ["Checked", "Culprit", "Judgement", "Output", "Verdict", "check"]
