"""Traces of reads through the tables."""

import pytest

from kvflow.testing.replay import replay

from .test_replay import PREFILL, Trace, first, lines_of, trace

__all__ = ["trace"]

LENT = [
    *PREFILL[:2],
    ("prefill_finished", "registered", "lent"),
    ("fetched", "lent", "sent"),
]
READ = [
    ("blocks_allocated", "new", "allocated"),
    ("peer_met", "allocated", "reading"),
    ("done", "reading", "received"),
]


@pytest.mark.parametrize(("steps", "matched"), [(4, 1), (3, 0)])
def test_what_was_read_was_held_until_it_had_been_read_s8(
    trace: Trace, steps: int, matched: int
) -> None:
    lent = lines_of("producer", LENT[:steps], engine="p", peer="c/pp0.tp0/1f")
    report = replay([trace(lent + lines_of("consumer", READ, engine="c", peer="host:5600"))])
    assert report.matched == matched
    if not matched:
        assert "p pp0.tp0 never sent attempt 16 of t" in first(report)
