"""Eager and compiled programs measured side by side."""
