"""The loop IR: frozen data, its algebra, its text form and its meaning."""
