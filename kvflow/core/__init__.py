"""The state machines: pure, driven as events in, effects out, with time passed in."""

from kvflow.core.engine import TABLES, Engine
from kvflow.core.reasons import REASONS, Reason, Standing
from kvflow.core.table import Row, Table
from kvflow.core.timings import Timings
from kvflow.core.urgency import Urgency

__all__ = [
    "REASONS",
    "TABLES",
    "Engine",
    "Reason",
    "Row",
    "Standing",
    "Table",
    "Timings",
    "Urgency",
]
