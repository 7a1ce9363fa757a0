"""Benchmarks that an operator can run: `kvflow bench`."""
