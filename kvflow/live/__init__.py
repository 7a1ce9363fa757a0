"""Live transfers of running engines, seen from outside: `kvflow top` and `kvflow inspect`."""
