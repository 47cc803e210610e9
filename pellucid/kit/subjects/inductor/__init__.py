"""TorchInductor as a subject; only this package knows its internals.

Inductor generates a Python module whose function `call` allocates buffers and calls kernels and library operators. The
hooks around its calls are inserted into that text, so the observed code is the code that runs: same kernels, same reuse
of memory.

`subject.py` implements the kit's interface; `made.py` records what Inductor generates for a graph, and its refusals;
`text.py` parses the generated module and inserts hooks; `loops.py` evaluates the lowered loops without code generation.
"""

from pellucid.kit.subjects.inductor.subject import Inductor, check_options

__all__ = ["Inductor", "check_options"]
