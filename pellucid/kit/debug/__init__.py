"""The tools that find what is wrong with a compiled program, and where."""
