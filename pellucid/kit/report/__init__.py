"""One page about a program: what a run holds becomes a view, and that one HTML file without links to anywhere."""
