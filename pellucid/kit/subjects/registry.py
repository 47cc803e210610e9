"""The subject of each backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pellucid.errors import UserError, near
from pellucid.kit.subjects.base import Subject
from pellucid.kit.subjects.plain import Plain


def subject_of(backend: str, options: Mapping[str, Any] | None = None) -> Subject:
    """The subject for a backend of `torch.compile`. Raises UserError if there is no backend of this name."""
    options = dict(options or {})
    if backend == "pellucid":
        from pellucid.kit.subjects.pellucid import Pellucid
        from pellucid.options import make_options

        make_options(options)
        return Pellucid({**options, "background": False})  # always test the compiled program
    if backend == "inductor":
        from pellucid.kit.subjects.inductor import Inductor, check_options

        check_options(options)
        return Inductor(options)
    from torch._dynamo.backends.registry import list_backends

    known = list_backends(exclude_tags=())
    if backend not in known:
        usual = sorted({"pellucid", "inductor", "eager", *list_backends()})
        hint = near(backend, {*known, *usual}) or f"use one of {', '.join(usual)}, or PyTorch's debugging backends"
        raise UserError(f"there is no backend {backend!r}", hint=hint)
    return Plain(options, backend)
