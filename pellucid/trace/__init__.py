"""Runs: a folder per compiled graph with every stage's result, as text for people and tools."""
