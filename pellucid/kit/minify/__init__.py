"""Minify a failing program."""
