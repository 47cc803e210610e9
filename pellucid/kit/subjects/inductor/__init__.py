"""TorchInductor as a subject: all of the kit that knows its insides.

Inductor writes a Python module whose function `call` allocates buffers and calls kernels and library operators. The
hooks around its calls are put into that text, so what is observed is what runs: same kernels, same reuse of memory.

`subject.py` compiles and tells; `made.py` hears what Inductor makes of a graph and why not otherwise; `text.py` reads
the module that it wrote and puts hooks into it; `loops.py` runs what it lowers to without its code generation.
"""

from pellucid.kit.subjects.inductor.subject import Inductor, check_options

__all__ = ["Inductor", "check_options"]
