"""An engine that a JSON file describes (as for `kvflow plan`), as if it had been met."""

from pathlib import Path

from kvflow.doctor.facts import Side
from kvflow.ids import AgentName, Incarnation
from kvflow.io.coordinates import Identity
from kvflow.planning.description import read


def side(name: str, path: Path) -> Side:
    """All its ranks. Raises `DescriptionError`."""
    engine = read(path)
    hellos = [
        Identity(
            engine_id=str(path),
            incarnation=Incarnation(name),
            rank=rank,
            facts=engine.facts(),
            regions=tuple(engine.regions(rank)),
        ).hello(AgentName(f"{name}/{rank}"), b"")
        for rank in engine.ranks
    ]
    return Side(name=name, where=str(path), ranks=tuple(hellos))
