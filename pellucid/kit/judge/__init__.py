"""Wrong, or rounding: eager is the specification, float64 the judge."""
