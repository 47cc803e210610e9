"""Benchmarks of eager and compiled programs, measured side by side."""
