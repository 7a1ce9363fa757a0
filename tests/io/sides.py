"""Two workers over a `MemoryPort` each, for the tests of the driver and of the loop."""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from kvflow.core import Reason
from kvflow.core import events as ev
from kvflow.core.effects import Moved
from kvflow.core.notices import Offer
from kvflow.core.producer import prefill_name
from kvflow.errors import KVFlowError
from kvflow.ids import Address, AgentName, Rank, RequestId, TransferId, new_incarnation
from kvflow.io.coordinates import Identity
from kvflow.io.driver import Driver
from kvflow.io.seal import Seal
from kvflow.layout import Facts, Region
from kvflow.observe.history import History
from kvflow.observe.observer import Carried
from kvflow.settings import Settings
from kvflow.testing.port import MemoryNetwork, MemoryPort
from kvflow.wire import codec
from kvflow.wire import messages as m

LAYERS = 2
BLOCKS = 32
BLOCK_BYTES = 256
GAP_BYTES = 64
BLOCK_TOKENS = 16
SOURCE = [3, 4, 5, 9, 1, 20]
DESTINATION = [6, 7, 8, 2, 31, 12]
PAIRS = list(zip(SOURCE, DESTINATION, strict=True))
FACTS = Facts(
    model="tiny layers=2",
    kv_dtype="torch.bfloat16",
    block_sizes=(BLOCK_TOKENS,),
    group_kinds=("FullAttentionSpec",),
    tp_size=1,
    pp_size=1,
    kv_layout="page (2, 16, 4) strides (128, 8, 1)",
)


class Clock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """One worker's KV: blocks with gaps between them, so that a byte too many is seen."""

    def __init__(self, seed: int, blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES) -> None:
        shape = (LAYERS, blocks, block_bytes + GAP_BYTES)
        rng = np.random.default_rng(seed)
        self.array = rng.integers(0, 256, shape, dtype=np.uint8)
        self.block_bytes = block_bytes

    @property
    def regions(self) -> tuple[Region, ...]:
        layers, blocks, stride = self.array.shape
        return tuple(
            Region.pages(
                layer=f"layer.{layer}",
                group=0,
                base=self.array[layer].ctypes.data,
                block_bytes=self.block_bytes,
                stride_bytes=stride,
                blocks=blocks,
                memory="DRAM",
                device=0,
                tokens=BLOCK_TOKENS,
            )
            for layer in range(layers)
        )

    def block(self, index: int) -> np.ndarray:
        """One block of every layer, without its gap."""
        return self.array[:, index, : self.block_bytes]

    def with_blocks(self, other: "Memory", pairs: list[tuple[int, int]]) -> np.ndarray:
        """What this memory is to hold once `other`'s blocks have come: (theirs, ours)."""
        expected = self.array.copy()
        for theirs, ours in pairs:
            expected[:, ours, : self.block_bytes] = other.block(theirs)
        return expected


@dataclass
class Reports:
    """What vLLM was told, in order."""

    sent_ids: list[RequestId] = field(default_factory=list)
    received_ids: list[tuple[RequestId, Reason | None]] = field(default_factory=list)

    def sent(self, request_id: RequestId) -> None:
        self.sent_ids.append(request_id)

    def received(self, request_id: RequestId, reason: Reason | None) -> None:
        self.received_ids.append((request_id, reason))


@dataclass
class Notes:
    """An observer that keeps everything, and lets a history remember if there is one."""

    history: History | None = None
    moves: list[Moved] = field(default_factory=list)
    orders: list[Carried] = field(default_factory=list)
    ignored_kinds: Counter[str] = field(default_factory=Counter)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    failures: list[tuple[str, BaseException]] = field(default_factory=list)

    def moved(self, moved: Moved) -> None:
        self.moves.append(moved)
        if self.history is not None:
            self.history.note(moved)

    def carried(self, carried: Carried) -> None:
        self.orders.append(carried)

    def ignored(self, kind: str, key: str) -> None:
        self.ignored_kinds[kind] += 1

    def refused(self, kind: str, detail: str) -> None:
        self.refusals.append((kind, detail))

    def failed(self, what: str, error: BaseException) -> None:
        self.failures.append((what, error))

    def ended(self, machine: str) -> list[Moved]:
        return [moved for moved in self.moves if moved.machine == machine and moved.spent_ms]


def identity(
    memory: Memory,
    engine_id: str,
    *,
    rank: Rank = Rank(0, 0),
    facts: Facts = FACTS,
    prompt_tokens_max: int | None = None,
) -> Identity:
    return Identity(
        engine_id=engine_id,
        incarnation=new_incarnation(),
        rank=rank,
        facts=facts,
        regions=memory.regions,
        prompt_tokens_max=prompt_tokens_max,
    )


def agent_of(who: Identity) -> AgentName:
    return AgentName(f"{who.engine_id}/{who.rank}/{who.incarnation[:8]}")


class Side:
    """One worker: memory, port, driver, and what came out of it."""

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        clock: Clock,
        *,
        memory: Memory | None = None,
        settings: Settings | None = None,
        rank: Rank = Rank(0, 0),
        facts: Facts = FACTS,
        seal: Seal | None = None,
        prompt_tokens_max: int | None = None,
    ) -> None:
        self.address = Address(name, 5600)
        self.memory = memory or Memory(seed=len(name))
        self.reports = Reports()
        self.notes = Notes()
        self.meetings: list[Address] = []
        who = identity(
            self.memory, name, rank=rank, facts=facts, prompt_tokens_max=prompt_tokens_max
        )
        self.port = MemoryPort(agent_of(who), network)
        self.port.register(who.regions)
        self.driver = Driver(
            identity=who,
            port=self.port,
            settings=settings or Settings(),
            clock=clock,
            start_meeting=self.meetings.append,
            results=self.reports,
            observer=self.notes,
            seal=seal,
        )

    @property
    def agent(self) -> AgentName:
        return self.port.name

    def reply(self) -> m.MeetReply:
        """What this engine's side channel says."""
        hello = self.driver.hello
        return m.MeetReply(engine_id=hello.engine_id, incarnation=hello.incarnation, ranks=(hello,))

    def loses(self, peer: "Side") -> None:
        """The transfer library says that the peer cannot be reached."""
        self.driver.take(ev.NoticeFailed(agent=peer.agent, detail="a test"))

    def state(self, machine: str, key: str) -> str:
        records = self.driver.engine.records
        table = records.producers if machine == "producer" else records.consumers
        record = table.get(key)
        return record.state if record else "none"


class Pair:
    """A producer and a consumer on one clock; the consumer `reads`, or it is written to."""

    def __init__(self, producer: Side, consumer: Side, clock: Clock) -> None:
        self.reads = False
        self.producer = producer
        self.consumer = consumer
        self.clock = clock

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.producer, self.consumer

    def turn(self, seconds: float = 0.01) -> None:
        """Time passes, meetings are answered, both look for news."""
        self.clock.now += seconds
        for asking, asked in (self.sides, self.sides[::-1]):
            while asking.meetings:
                address = asking.meetings.pop(0)
                if address == asked.address:
                    asking.driver.met(address, asked.reply())
                else:
                    asking.driver.not_met(address, KVFlowError(f"nobody at {address}"))
        for side in self.sides:
            side.driver.look()

    def turn_until_quiet(self, turns: int = 3000) -> None:
        """Turns until both sides have nothing live; fails if that does not come."""
        for _ in range(turns):
            if not any(side.driver.engine.live for side in self.sides):
                return
            self.turn()
        raise AssertionError([side.driver.engine.records.population for side in self.sides])

    def turn_until_quiet_of_producer(self, turns: int = 3000) -> None:
        """The same, of a producer whose consumer is dead."""
        for _ in range(turns):
            if not self.producer.driver.engine.live:
                return
            self.clock.now += 0.01
            self.producer.driver.look()
        raise AssertionError(self.producer.driver.engine.records.population)

    def turn_times(self, turns: int, seconds: float = 0.01) -> None:
        for _ in range(turns):
            self.turn(seconds)

    def start_prefill(self, transfer: str) -> None:
        self.producer.driver.take(
            ev.PrefillStarted(transfer_id=TransferId(transfer), request_id=prefill_of(transfer))
        )

    def finish_prefill(self, transfer: str, blocks: list[int]) -> None:
        self.producer.driver.take(
            ev.PrefillFinished(
                transfer_id=TransferId(transfer),
                request_id=prefill_of(transfer),
                blocks=(tuple(blocks),),
                tokens=len(blocks) * BLOCK_TOKENS,
            )
        )

    def load(
        self,
        transfer: str,
        blocks: list[int],
        attempt: int = 16,
        skip: int = 0,
        offer: Offer | None = None,
    ) -> None:
        event = allocated(transfer, self.producer.address, blocks, attempt=attempt, skip=skip)
        event = replace(event, reads=self.reads, offer=offer)
        self.consumer.driver.take(event)

    def attempts_written(self) -> list[int]:
        """The attempt of each WRITE that the producer has begun, in order."""
        moves = self.producer.notes.moves
        return [moved.attempt for moved in moves if moved.dest == "transferring"]

    def moves_another(self) -> None:
        """Whatever happened to others: the next transfer comes."""
        before = len(self.consumer.reports.received_ids)
        self.finish_prefill("next", SOURCE)
        self.load("next", DESTINATION, attempt=160)
        self.turn_until_quiet()
        assert self.consumer.reports.received_ids[before:] == [(load_of("next"), None)]

    def is_clean(self) -> bool:
        """Nothing reserved, pinned, posted, or waiting to be sent."""
        return all(
            side.driver.engine.ledger.empty and not side.driver._transfers and not side.port.posts
            for side in self.sides
        )


def prefill_first(pair: Pair, transfer: str) -> None:
    pair.start_prefill(transfer)
    pair.finish_prefill(transfer, SOURCE)
    pair.turn_times(3)
    pair.load(transfer, DESTINATION)


def registration_first(pair: Pair, transfer: str) -> None:
    pair.load(transfer, DESTINATION)
    pair.turn_times(3)
    pair.start_prefill(transfer)
    pair.turn_times(3)
    pair.finish_prefill(transfer, SOURCE)


def offer_of(transfer: str, blocks: list[int] = SOURCE) -> Offer:
    """What a router hears of a finished prefill."""
    return Offer(
        blocks=(tuple(blocks),),
        tokens=len(blocks) * BLOCK_TOKENS,
        prefill=prefill_name(prefill_of(transfer)),
    )


def prefill_of(transfer: str) -> RequestId:
    return RequestId(f"prefill-{transfer}")


def load_of(transfer: str) -> RequestId:
    return RequestId(f"load-{transfer}")


def allocated(
    transfer: str, address: Address, blocks: list[int], *, attempt: int = 16, skip: int = 0
) -> ev.BlocksAllocated:
    return ev.BlocksAllocated(
        transfer_id=TransferId(transfer),
        request_id=load_of(transfer),
        attempt=attempt,
        address=address,
        engine_id=None,
        blocks=(tuple(blocks),),
        starts=(BLOCK_TOKENS * skip,),
        tokens=(skip + len(blocks)) * BLOCK_TOKENS,
    )


def frame_of(side: Side, *notices: object, **changes: object) -> bytes:
    """A frame as `side` would send it, its coordinates changed."""
    hello = m.Hello(**{**_fields(side.driver.hello), **changes})
    return codec.encode_frame(notices, hello)


def _fields(hello: m.Hello) -> dict[str, object]:
    return {name: getattr(hello, name) for name in hello.__struct_fields__}


def changed(facts: Facts, **fields: object) -> Facts:
    return replace(facts, **fields)
