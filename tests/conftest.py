"""What holds for all tests."""

from __future__ import annotations

import os
import signal

# Kernels are the same on every run, whatever was measured on the machine.
os.environ.setdefault("PELLUCID_MACHINE", "reference")

# A runner that starts the tests in the background leaves Ctrl-C ignored, for the processes that tests start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
