"""Fakes for tests of kvflow and of what is built on it: they are public, and documented as such.

network      a seeded network between named agents that loses, doubles, delays and cuts.
world        several engines on one virtual clock, with modelled memory, drivers and vLLMs.
invariants   what must never happen in such a world, checked at every step.
transcript   what a world did, as text that people read.
bench        one engine on a bench, driven by hand.
ways         how to get to each state of each table by real events.
rows         which rows of the tables were taken, and whether their guards exclude each other.
"""
