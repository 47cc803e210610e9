"""The programs under test, and their ATen graphs."""
