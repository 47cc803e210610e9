"""Backends under test, behind one interface; the only place that knows what is inside of one."""
