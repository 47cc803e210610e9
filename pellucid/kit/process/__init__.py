"""Run code that may crash, hang or exhaust memory in separate processes."""
