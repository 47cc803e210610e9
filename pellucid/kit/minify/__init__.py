"""The smallest program that still fails."""
