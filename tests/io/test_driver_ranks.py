"""Engines of several ranks over real bytes: everything owed arrives, whoever has how many ranks."""

from dataclasses import replace

import numpy as np
import pytest

from kvflow.core import Reason
from kvflow.core import events as ev
from kvflow.core.notices import Offer
from kvflow.core.producer import prefill_name
from kvflow.ids import Address, Rank, RequestId, TransferId
from kvflow.io.driver import Driver
from kvflow.layout import Plane, Region, Side
from kvflow.settings import Settings
from kvflow.testing.port import MemoryNetwork, MemoryPort
from kvflow.wire import messages as m

from .sides import FACTS, Clock, Identity, Notes, Reports, agent_of, new_incarnation

LAYERS, HEADS, DIMS, TOKENS = 4, 4, 8, 96
LOAD, PREFILL, T = RequestId("load"), RequestId("prefill"), TransferId("t")


class Worker:
    """One rank: (layer, block, head, token, dim) bytes, its driver, and what vLLM was told."""

    def __init__(
        self, name: str, rank: Rank, side: Side, block: int, network: MemoryNetwork, clock: Clock
    ) -> None:
        heads = max(HEADS // side.tp_size, 1)
        rng = np.random.default_rng([rank.pp, rank.tp, len(name)])
        self.first = rank.tp * HEADS // side.tp_size
        self.layers = range(
            rank.pp * LAYERS // side.pp_size, (rank.pp + 1) * LAYERS // side.pp_size
        )
        self.block = block
        shape = (len(self.layers), 2 + TOKENS // block, heads, block, DIMS)
        self.memory = rng.integers(0, 256, shape, dtype=np.uint8)
        self.reports, self.notes = Reports(), Notes()
        self.meetings: list[Address] = []
        who = Identity(
            engine_id=name,
            incarnation=new_incarnation(),
            rank=rank,
            facts=replace(FACTS, tp_size=side.tp_size, pp_size=side.pp_size, block_sizes=(block,)),
            regions=tuple(self._region(layer) for layer in self.layers),
        )
        self.port = MemoryPort(agent_of(who), network)
        self.port.register(who.regions)
        self.driver = Driver(
            identity=who,
            port=self.port,
            settings=Settings(),
            clock=clock,
            start_meeting=self.meetings.append,
            results=self.reports,
            observer=self.notes,
        )

    def _region(self, layer: int) -> Region:
        _, blocks, heads, tokens, dims = self.memory.shape
        plane = Plane(
            name="kv",
            offset=0,
            head_stride=tokens * dims,
            rows=1,
            row_stride=dims,
            token_stride=dims,
            cell_bytes=dims,
        )
        return Region(
            layer=f"layer.{layer}",
            group=0,
            base=self.memory[layer - self.layers.start].ctypes.data,
            stride_bytes=heads * tokens * dims,
            block_bytes=heads * tokens * dims,
            blocks=blocks,
            tokens=tokens,
            heads=heads,
            head_first=self.first,
            heads_total=HEADS,
            planes=(plane,),
            encoding="bytes",
            memory="DRAM",
            device=0,
        )

    def kv(self, ids: list[int]) -> np.ndarray:
        """(layer, head, token, dim) of a request's blocks."""
        picked = self.memory[:, ids]
        return picked.transpose(0, 2, 1, 3, 4).reshape(
            len(self.layers), -1, len(ids) * self.block, DIMS
        )


class Engines:
    """A producer engine and a consumer engine."""

    def __init__(
        self,
        producing: int,
        consuming: int,
        source: int = 16,
        destination: int = 16,
        stages: tuple[int, int] = (1, 1),
        reads: bool = False,
    ) -> None:
        """Tensor-parallel ranks and block sizes; `stages` of pipelines; the producer's first."""
        self.reads = reads
        self.clock, network = Clock(), MemoryNetwork()
        self.address = Address("prefill", 5600)
        sides = [
            Side(tp_size=ranks, pp_size=count)
            for ranks, count in zip((producing, consuming), stages, strict=True)
        ]
        self.producers, self.consumers = (
            [
                Worker(name, Rank(pp, tp), side, block, network, self.clock)
                for pp in range(side.pp_size)
                for tp in range(side.tp_size)
            ]
            for name, side, block in zip(
                ("prefill", "decode"), sides, (source, destination), strict=True
            )
        )
        self.source_ids = list(range(1 + TOKENS // source, 1, -1))
        self.destination_ids = list(range(1, 1 + TOKENS // destination))
        if producing > HEADS:
            self._replicate()

    def _replicate(self) -> None:
        """Ranks that hold the same head hold the same bytes."""
        for worker in self.producers:
            twin = next(
                each
                for each in self.producers
                if (each.first, each.layers) == (worker.first, worker.layers)
            )
            worker.memory[:] = twin.memory

    def finish_prefill(self) -> None:
        event = ev.PrefillFinished(
            transfer_id=T, request_id=PREFILL, blocks=(tuple(self.source_ids),), tokens=TOKENS
        )
        for worker in self.producers:
            worker.driver.take(event)

    def load(self, start: int = 0, offer: Offer | None = None) -> None:
        block = self.consumers[0].block
        event = ev.BlocksAllocated(
            transfer_id=T,
            request_id=LOAD,
            attempt=16,
            address=self.address,
            engine_id=None,
            blocks=(tuple(self.destination_ids[start // block :]),),
            starts=(start,),
            tokens=TOKENS,
            reads=self.reads,
            offer=offer,
        )
        for worker in self.consumers:
            worker.driver.take(event)

    def offer(self, when: str) -> Offer:
        """What a router has heard of the prefill, or of one before it under the same id."""
        if when == "of another prefill":
            return Offer(blocks=(tuple(self.source_ids[::-1]),), tokens=TOKENS, prefill="before")
        blocks = (tuple(self.source_ids),)
        return Offer(blocks=blocks, tokens=TOKENS, prefill=prefill_name(PREFILL))

    def run(self, turns: int = 400, without: Worker | None = None) -> None:
        ranks = tuple(worker.driver.hello for worker in self.producers)
        reply = m.MeetReply(engine_id="prefill", incarnation=ranks[0].incarnation, ranks=ranks)
        for _ in range(turns):
            self.clock.now += 0.01
            for worker in self.consumers:
                while worker.meetings:
                    worker.driver.met(worker.meetings.pop(), reply)
            for worker in [*self.producers, *self.consumers]:
                if worker is not without:
                    worker.driver.look()

    def produced(self) -> np.ndarray:
        """(layer, head, token, dim) of the whole prompt, each head once."""
        whole = np.zeros((LAYERS, HEADS, TOKENS, DIMS), dtype=np.uint8)
        for worker in self.producers:
            part = worker.kv(self.source_ids)
            layers = slice(worker.layers.start, worker.layers.stop)
            whole[layers, worker.first : worker.first + part.shape[1]] = part
        return whole

    def check(self) -> None:
        """Every consumer rank has its heads of its layers, and everybody's blocks are free."""
        whole = self.produced()
        for worker in self.consumers:
            assert worker.reports.received_ids == [(LOAD, None)]
            layers = slice(worker.layers.start, worker.layers.stop)
            wanted = whole[layers, worker.first : worker.first + worker.memory.shape[2]]
            assert np.array_equal(worker.kv(self.destination_ids), wanted)
        for worker in self.producers:
            assert worker.driver.engine.ledger.empty
            assert not worker.notes.failures
            # Also of a rank with copies of heads that others have written.
            assert worker.reports.sent_ids == [PREFILL]


RANKS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (2, 8), (8, 2), (8, 8), (4, 8)]
BLOCKS = [(16, 16), (16, 32), (32, 16), (32, 48), (48, 32)]


@pytest.mark.parametrize(("producing", "consuming"), RANKS)
@pytest.mark.parametrize(("source", "destination"), BLOCKS)
@pytest.mark.parametrize("prefill_first", [True, False], ids=["prefill first", "decode first"])
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_every_rank_has_its_heads_of_every_token_s6(
    producing: int, consuming: int, source: int, destination: int, prefill_first: bool, reads: bool
) -> None:
    engines = Engines(producing, consuming, source, destination, reads=reads)
    steps = [engines.finish_prefill, engines.load]
    for step in steps if prefill_first else reversed(steps):
        step()
        engines.run(20)
    engines.run()
    engines.check()


@pytest.mark.parametrize("stages", [(2, 1), (1, 2), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_every_stage_has_its_layers_s6(
    stages: tuple[int, int], ranks: tuple[int, int], reads: bool
) -> None:
    engines = Engines(*ranks, stages=stages, reads=reads)
    engines.load()
    engines.run(20)
    engines.finish_prefill()
    engines.run()
    engines.check()


@pytest.mark.parametrize(("producing", "consuming"), RANKS)
@pytest.mark.parametrize("when", ["told already", "not told yet", "of another prefill"])
def test_what_the_router_tells_of_is_read_before_the_producers_have_spoken_s6_s8(
    producing: int, consuming: int, when: str
) -> None:
    engines = Engines(producing, consuming, reads=True)
    steps = [engines.finish_prefill, lambda: engines.load(offer=engines.offer(when))]
    for step in steps if when == "told already" else reversed(steps):
        step()
        engines.run(20)
    engines.run()
    engines.check()
    read = sum(worker.port.counts.bytes_read for worker in engines.consumers)
    wanted = sum(worker.kv(engines.destination_ids).nbytes for worker in engines.consumers)
    assert read == wanted * (2 if when == "of another prefill" else 1)


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_what_is_here_already_is_not_touched(reads: bool) -> None:
    engines = Engines(2, 1, 16, 32, reads=reads)
    (worker,) = engines.consumers
    before = worker.kv(engines.destination_ids).copy()
    engines.finish_prefill()
    engines.load(start=64)
    engines.run()
    assert worker.reports.received_ids == [(LOAD, None)]
    after = worker.kv(engines.destination_ids)
    assert np.array_equal(after[:, :, :64], before[:, :, :64])
    assert np.array_equal(after[:, :, 64:], engines.produced()[:, :, 64:])


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_each_byte_is_moved_once(reads: bool) -> None:
    engines = Engines(8, 2, 16, 16, reads=reads)
    engines.finish_prefill()
    engines.load()
    engines.run()
    written = sum(worker.port.counts.bytes_written for worker in engines.producers)
    read = sum(worker.port.counts.bytes_read for worker in engines.consumers)
    assert (written == 0) is reads
    assert written + read == sum(
        worker.kv(engines.destination_ids).nbytes for worker in engines.consumers
    )


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_without_one_of_its_ranks_an_engine_delivers_to_nobody_s2(reads: bool) -> None:
    engines = Engines(2, 1, 16, 16, reads=reads)
    engines.finish_prefill()
    engines.load()
    engines.run(turns=4000, without=engines.producers[1])
    (worker,) = engines.consumers
    assert [reason for _, reason in worker.reports.received_ids] == [Reason.PEER_LOST]


@pytest.mark.parametrize(("producing", "consuming"), [(2, 3), (3, 2), (3, 4)])
def test_ranks_that_do_not_divide_are_refused_with_both_numbers(
    producing: int, consuming: int
) -> None:
    engines = Engines(1, 1, 16, 16)
    (producer,), (consumer,) = engines.producers, engines.consumers
    for worker, size in ((producer, producing), (consumer, consuming)):
        who = worker.driver.identity
        worker.driver.identity = replace(who, facts=replace(who.facts, tp_size=size))
    hello = producer.driver.identity.hello(producer.port.name, producer.port.metadata())
    producer.driver._hello = hello
    engines.load()
    engines.run()
    ((_, reason),) = consumer.reports.received_ids
    assert reason is Reason.INCOMPATIBLE
    assert any("tensor-parallel size" in detail for _, detail in consumer.notes.refusals)
