"""Logs, traces and diagrams."""
