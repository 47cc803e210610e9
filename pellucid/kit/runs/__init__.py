"""Graphs and tensors as files: the folder that `capture` writes, and every tool takes."""
