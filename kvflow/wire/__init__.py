"""Typed, versioned, size-limited messages. No pickle."""
