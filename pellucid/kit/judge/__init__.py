"""Distinguish wrong results from rounding: eager is the specification, float64 the reference."""
