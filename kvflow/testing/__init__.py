"""Fakes for tests of kvflow and of what is built on it: they are public, and documented as such.

network      a seeded network between named agents that loses, doubles, delays and cuts.
world        several engines on one virtual clock, with modelled memory, drivers and vLLMs.
invariants   what must never happen in such a world, checked at every step.
transcript   what a world did, as text that people read.
faults       the kinds of fault that a world knows, by name.
chaos        everything that may be done to a world; operations: how often, with which numbers.
simulate     the seeded simulator, and how it shrinks what it found.
replay       traces of real engines through the tables.
commands     `kvflow simulate` and `kvflow replay`.
bench        one engine on a bench, driven by hand.
ways         how to get to each state of each table by real events.
rows         which rows of the tables were taken, and whether their guards exclude each other.
"""
