"""Where the time of a compiled program goes."""
