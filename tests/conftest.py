"""What holds for all tests."""

from __future__ import annotations

import signal

# A runner that starts the tests in the background leaves Ctrl-C ignored, for the processes that tests start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
