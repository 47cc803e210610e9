"""A `torch.compile` backend for CPUs that people can see through.

    model = torch.compile(model, backend="pellucid")

PyTorch finds the backend by its name once the package is installed. See `pellucid.options` for what can be set.
"""

from pellucid.support import check_versions

check_versions()
del check_versions
