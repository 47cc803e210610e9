"""The native stage: the C++ toolchain, the store of built kernels, and the runtime that executes a compiled graph."""
