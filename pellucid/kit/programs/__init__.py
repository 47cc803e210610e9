"""Programs that a tool looks into, and the ATen graphs of them."""
