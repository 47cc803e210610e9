"""The fixtures of the native stage's unit tests serve its slower tests as well."""

from tests.unit.native.conftest import add, kernels  # noqa: F401
