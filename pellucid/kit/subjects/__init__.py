"""Backends under test ("subjects"), behind one interface; only this package knows their internals."""
