"""Graphs and tensors as files: the run folder that `capture` writes and every tool accepts."""
