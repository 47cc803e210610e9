"""The debugging and benchmarking kit. Its Python API is `pellucid.debug` and `pellucid.bench`."""
