"""The tools that find faults of a compiled program, and their location."""
