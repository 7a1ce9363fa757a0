"""Traces to test with: of modelled worlds, and made by hand, with clocks that are apart.

    tape = Tape(ahead_s={"P": 3.2})
    tape.prefill(1, "prefill_started", "unknown", "allocated")
    tape.load(2, "blocks_allocated", "new", "allocated")
    paths = tape.write(directory)

Times of a `Tape` are milliseconds of the true time; each engine writes what its own clock shows.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import msgspec

from kvflow.core.effects import Moved
from kvflow.ids import AgentName
from kvflow.testing.world import World
from kvflow.tracing.clocks import estimate
from kvflow.tracing.lines import Line
from kvflow.tracing.transfers import gather, requests_of
from kvflow.tracing.waterfall import Waterfall, waterfall

EPOCH_S = 1_800_000_000.0
Value = str | int | float | None | dict[str, float]


class Tape:
    """Lines of a producer engine P and a consumer engine C, or of whichever engine is named."""

    def __init__(
        self, *, version: int = 2, of: str = "t", ahead_s: Mapping[str, float] | None = None
    ) -> None:
        self.version = version
        self.of = of
        self.attempt = 16
        self.ahead_s = dict(ahead_s or {})
        self.lines: dict[str, list[dict[str, Value]]] = {}

    def prefill(self, at_ms: float, trigger: str, source: str, dest: str, **more: Value) -> None:
        """A transition of the producer's record."""
        unclaimed = trigger.startswith("prefill_") and source in ("unknown", "allocated")
        peer = f"C/{more.pop('peer_rank', 'pp0.tp0')}/1"
        known: dict[str, Value] = {} if unclaimed else {"attempt": self.attempt, "peer": peer}
        self.line(at_ms, "producer", trigger, source, dest, **{"engine": "P", **known, **more})

    def load(self, at_ms: float, trigger: str, source: str, dest: str, **more: Value) -> None:
        """A transition of the consumer's record."""
        known: dict[str, Value] = {"engine": "C", "attempt": self.attempt, "peer": "P:5600"}
        self.line(at_ms, "consumer", trigger, source, dest, **{**known, **more})

    def vllm(self, at_ms: float, role: str, trigger: str, **more: Value) -> None:
        """A line of vLLM's side. `arrived` arrives when it is written, unless told otherwise."""
        engine = str(more.pop("engine", None) or ("P" if role == "producer" else "C"))
        known: dict[str, Value] = {"engine": engine, "rank": "scheduler"}
        if trigger == "arrived":
            known |= {"arrival": self._shown(at_ms, engine), "role": role}
        self.line(at_ms, "request", trigger, "", trigger, **{**known, **more})

    def order(self, began_ms: float, at_ms: float, machine: str, **more: Value) -> None:
        """A WRITE or READ order that was taken at `began_ms` and ended at `ms`."""
        engine = str(more.pop("engine", None) or ("P" if machine == "write" else "C"))
        known: dict[str, Value] = {
            "engine": engine,
            "began": self._shown(began_ms, engine),
            "attempt": self.attempt,
            "peer": "C/pp0.tp0/1" if machine == "write" else "P/pp0.tp0/1",
            "bytes": 4096,
            "runs": 2,
            "posts": 1,
        }
        self.line(at_ms, machine, "done", "posted", "done", **{**known, **more})

    def meet(self, allocated: float, asked: float, recorded: float, answered: float) -> None:
        """The consumer meets the producer, which computes the prompt, registers, is answered."""
        self.load(allocated, "blocks_allocated", "new", "allocated")
        self.load(asked, "peer_met", "allocated", "registering")
        self.prefill(recorded, "registered", "allocated", "registered")
        self.load(answered, "accepted", "registering", "registered")

    def line(
        self, at_ms: float, machine: str, trigger: str, source: str, dest: str, **more: Value
    ) -> None:
        """Any line."""
        engine = str(more["engine"])
        request = "p1" if engine.startswith("P") else "c1"
        self.lines.setdefault(engine, []).append(
            {
                "v": self.version,
                "t": self._shown(at_ms, engine),
                "rank": "pp0.tp0",
                "machine": machine,
                "id": self.of,
                "attempt": 0,
                "request": request,
                "trigger": trigger,
                "from": source,
                "to": dest,
                **more,
            }
        )

    def text(self, engine: str) -> str:
        """What is in one engine's file, in the order of its clock."""
        lines = sorted(self.lines[engine], key=_shown_at)
        return "".join(json.dumps(line) + "\n" for line in lines)

    def parsed(self) -> list[Line]:
        """All lines, as a reader has them."""
        texts = (text for engine in self.lines for text in self.text(engine).splitlines())
        return [msgspec.json.decode(text, type=Line) for text in texts]

    def write(self, directory: Path) -> list[Path]:
        """One file for each engine."""
        paths = []
        for number, engine in enumerate(self.lines):
            path = directory / f"{number}.ndjson"
            path.write_text(self.text(engine), encoding="utf-8")
            paths.append(path)
        return paths

    def _shown(self, ms: float, engine: str) -> float:
        return round(EPOCH_S + ms / 1000 + self.ahead_s.get(engine, 0.0), 6)


def decode_after_prefill(tape: Tape) -> None:
    """The prefill is over at 30, the consumer's leg arrives at 35, its first token comes at 55."""
    tape.vllm(0, "producer", "arrived")
    tape.vllm(5, "producer", "scheduled")
    tape.prefill(5, "prefill_started", "unknown", "allocated")
    tape.prefill(30, "prefill_finished", "allocated", "prefilled")
    tape.vllm(35, "consumer", "arrived")
    tape.load(38, "blocks_allocated", "new", "allocated")
    tape.load(38.5, "peer_met", "allocated", "registering")
    tape.prefill(41, "registered", "prefilled", "transferring")
    tape.load(41.4, "accepted", "registering", "transferring")
    tape.prefill(50, "write_done", "transferring", "sent")
    tape.load(51, "done", "transferring", "received")
    tape.vllm(55, "consumer", "first_token")


def _shown_at(line: Mapping[str, Value]) -> float:
    at = line["t"]
    assert isinstance(at, float)
    return at


def write_world(
    world: World, directory: Path, ahead_s: Mapping[str, float] | None = None
) -> list[Path]:
    """A world's transitions as the traces of its engines, one file a worker.

    ahead_s  by engine, which is the worker's name up to its rank: "P-1" of "P-1-pp0.tp1".
    """
    lines: dict[AgentName, list[str]] = {}
    for _, agent, effect in world.log:
        if isinstance(effect, Moved):
            engine = _engine(agent)
            shown = effect.at + (ahead_s or {}).get(engine, 0.0)
            line: dict[str, object] = {
                "v": 1,
                "t": round(EPOCH_S + shown, 6),
                "engine": engine,
                "rank": str(world.ranks[agent]),
                "machine": effect.machine,
                "id": effect.key,
                "attempt": effect.attempt,
                "request": effect.request_id,
                "trigger": effect.trigger,
                "from": effect.source,
                "to": effect.dest,
                "reason": effect.reason,
                "peer": _peer(world, effect.peer),
            }
            lines.setdefault(agent, []).append(json.dumps(line) + "\n")
    paths = []
    for agent, written in lines.items():
        path = directory / f"{agent}.ndjson"
        path.write_text("".join(written), encoding="utf-8")
        paths.append(path)
    return paths


def _engine(agent: str) -> str:
    return agent.partition("-pp")[0]


def _peer(world: World, peer: str) -> str:
    """Agents are named as the connector names them: engine, rank, incarnation."""
    rank = world.ranks.get(AgentName(peer))
    return peer if rank is None else f"{_engine(peer)}/{rank}/{peer}"


def followed(lines: Iterable[Line]) -> list[Waterfall]:
    """The critical path of each request, checked to add up."""
    lines = list(lines)
    transfers = gather(lines, estimate(lines))
    falls = [waterfall(request) for transfer in transfers for request in requests_of(transfer)]
    for fall in falls:
        adds_up(fall)
    return falls


def adds_up(fall: Waterfall) -> None:
    """The parts are without a gap and without an overlap, from the start to the end."""
    assert sum(segment.us for segment in fall.segments) == fall.span_us >= 0
    assert all(segment.us > 0 for segment in fall.segments)
    assert all(one.end == other.begin for one, other in pairwise(fall.segments))
    if fall.segments:
        assert (fall.segments[0].begin, fall.segments[-1].end) == (fall.start, fall.end)


def parts_of(tape: Tape) -> list[tuple[str, float]]:
    """The parts of its only request, in milliseconds."""
    [fall] = followed(tape.parsed())
    return [(segment.part.value, segment.us / 1000) for segment in fall.segments]
