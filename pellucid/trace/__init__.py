"""Runs: a folder per compiled graph with every stage's result, as text that people and tools read."""
