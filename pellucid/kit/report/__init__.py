"""The report of a program: the contents of a run become a view, and the view one self-contained HTML file."""
