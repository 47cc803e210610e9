"""Capture: PyTorch's graphs, passes on them, and the data that the rest of the compiler reads."""
