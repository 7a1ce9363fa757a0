"""What must never happen in a world, checked from outside: against modelled memory, not the ledger.

S1  a block is the destination of at most one live load.
S2  destination blocks are not given back while a slice may still land in them.
S3  source blocks are not released while a slice that their own worker has posted reads them.
S4  a slice is posted only while `may_write` holds, from a pinned prefill.
S5  each request is reported at most once per direction, and only while vLLM waits for it.
S6  a load that is reported received holds exactly the right content, and keeps it. (That a READ
    counts only if its producer held the blocks until it was over, S8, is part of that here.)
S7  nothing lands in a block of another transfer than the one that is written.
T4  of what is counted, every start has one end, and every registration received one fate.
L1  once the faults stop, everything ends in bounded time, and every table is empty in the end.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvflow.core import TABLES, consumer
from kvflow.core.ledger import Block
from kvflow.core.notices import Blocks
from kvflow.ids import ATTEMPT_STRIDE, RequestId, transfer_of

if TYPE_CHECKING:
    from kvflow.testing.decode_engine import Consumer
    from kvflow.testing.driver import Node, Slice
    from kvflow.testing.prefill_engine import Producer
    from kvflow.testing.prompts import Load, Prefill
    from kvflow.testing.world import World


class InvariantBrokenError(AssertionError):
    """Names the invariant."""


def _check(holds: bool, invariant: str, said: str) -> None:
    if not holds:
        raise InvariantBrokenError(f"{invariant}: {said}")


def flat(blocks: Blocks) -> tuple[Block, ...]:
    """(group, block id) of each block."""
    return tuple((group, block) for group, ids in enumerate(blocks) for block in ids)


def blocks_have_one_owner(node: "Node") -> None:
    """S1."""
    owners: dict[Block, RequestId] = {}
    for record in node.engine.records.consumers.values():
        if record.state not in consumer.LIVE:
            continue
        for block in flat(record.blocks):
            other = owners.setdefault(block, record.request_id)
            if other != record.request_id:
                _check(False, "S1", f"{block} is {other}'s and {record.request_id}'s")


def nothing_lands_in(world: "World", node: "Node", blocks: Iterable[Block]) -> None:
    """S2, at the moment when blocks are given back."""
    given_back = set(blocks)
    for each in world.slices:
        if each.receiver == node.agent:
            hit = given_back & set(each.destination)
            _check(not hit, "S2", f"{hit} given back while {each} is under way")


def nothing_reads_from(world: "World", node: "Node", blocks: Iterable[Block]) -> None:
    """S3, at the moment when blocks are released."""
    released = set(blocks)
    for each in world.slices:
        if each.sender == node.agent and not each.reads:
            hit = released & set(each.source)
            _check(not hit, "S3", f"{hit} released while {each} reads them")


def slice_may_be_posted(node: "Node", each: "Slice") -> None:
    """S4."""
    may = node.engine.may_write(each.part, each.attempt, node.clock)
    _check(may, "S4", f"{each} posted without permission")
    content = [node.memory.get((block, node.rank)) for block in each.source]
    right = all(tag is not None and tag.transfer_id == transfer_of(each.part) for tag in content)
    _check(right, "S4", f"{each} posted from {content}")


def slice_may_land(node: "Node", each: "Slice", loads: Iterable["Load"]) -> None:
    """S2 and S7: whose blocks are these when the bytes arrive?"""
    for load in loads:
        if load.given_back or not set(flat(load.blocks)) & set(each.destination):
            continue
        record = node.engine.records.consumers.get(load.request_id)
        wanted = (load.transfer_id, record.attempt if record else None)
        mine = wanted == (transfer_of(each.part), each.attempt)
        mine = mine and load.attempt <= each.attempt < load.attempt + ATTEMPT_STRIDE
        _check(mine, "S7", f"{each} landed in {load}")
        open_ = load.state == "loading" and node.agent not in load.reported
        _check(open_, "S2", f"{each} landed in {load}")
        return
    _check(False, "S2", f"{each} landed in blocks that nobody loads into")


def prefill_is_awaited(prefill: "Prefill | None", node: "Node", request_id: RequestId) -> None:
    """S5, producer."""
    _check(prefill is not None, "S5", f"{node.agent} reported {request_id}, unknown to vLLM")
    assert prefill is not None
    _check(prefill.state == "finished", "S5", f"{node.agent} reported {prefill}")
    _check(node.agent in prefill.held_by, "S5", f"{node.agent} reported {prefill} twice")


def load_is_awaited(load: "Load | None", node: "Node", request_id: RequestId) -> None:
    """S5, consumer."""
    _check(load is not None, "S5", f"{node.agent} reported {request_id}, unknown to vLLM")
    assert load is not None
    awaited = load.state == "loading" and node.agent not in load.reported
    _check(awaited, "S5", f"{node.agent} reported {load}")


def content_is_right(node: "Node", load: "Load") -> None:
    """S6: every rank's part of every block, in order, from one prefill, and of the load's prompt.

    It is noted which one: after a preemption it must be that one again.
    """
    sources = set()
    for group, ids in enumerate(load.blocks):
        for nth, block in enumerate(ids):
            for rank in load.writers(node):
                tag = node.memory.get(((group, block), rank))
                wanted = (load.transfer_id, load.prompt, group, load.first[group] + nth)
                got = (tag.transfer_id, tag.prompt, tag.group, tag.position) if tag else None
                _check(got == wanted, "S6", f"block {block} of {load} holds {tag} from {rank}")
                sources.add(tag.request_id if tag else None)
    _check(len(sources) <= 1, "S6", f"{load} is a mixture of prefills {sources}")
    for source in sources:
        before = load.sources.setdefault(node.agent, source or "")
        _check(source == before, "S6", f"{load} had the KV of {before}, and now has {source}'s")


def what_is_kept_is_held(node: "Node", producer: "Producer") -> None:
    """S3: vLLM holds the blocks of a transfer that is kept or lent, and they have their content."""
    for record in node.engine.records.producers.values():
        if record.state not in ("kept", "lent"):
            continue
        prefill = producer.prefills[RequestId(record.request_id or "")]
        held = prefill.state == "finished" and node.agent in prefill.held_by
        _check(
            held and prefill.blocks == record.blocks,
            "S3",
            f"{prefill} is {record.state}, but not held",
        )
        tags = [node.memory.get((block, node.rank)) for block in flat(record.blocks)]
        right = all(tag is not None and tag.request_id == record.request_id for tag in tags)
        _check(right, "S3", f"{prefill} is {record.state}, but holds {tags}")


def everything_ended(node: "Node") -> None:
    """L1, first half."""
    engine = node.engine
    _check(engine.live == 0, "L1", f"{node.agent} has {engine.live} live transfers")
    _check(engine.ledger.empty, "L1", f"{node.agent}: the ledger is not empty")
    _check(not node.moves, "L1", f"{node.agent} has open writes or reads")


def tables_are_empty(node: "Node") -> None:
    """L1, second half."""
    records = node.engine.records
    tables: dict[str, object] = {
        "producers": records.producers,
        "consumers": records.consumers,
        "engines": records.engines,
        "workers": records.workers,
        "load_of": records.load_of,
        "engine_of": records.engine_of,
        "clocks": len(records.clocks),
        "deadlines": len(records.deadlines),
        "population": {pair: count for pair, count in records.population.items() if count},
        "reachable": node.reachable,
    }
    left = {name: table for name, table in tables.items() if table}
    _check(not left, "L1", f"{node.agent} still has {left}")


def pool_is_full(engine: "Producer | Consumer") -> None:
    """L1: every block is vLLM's again."""
    _check(not engine.alive or engine.pool.full, "L1", f"{engine.name} lost blocks")


def books_agree(node: "Node") -> None:
    """The records' own invariants: populations and users, counted anew."""
    records = node.engine.records
    counted: dict[tuple[str, str], int] = {}
    everything = [
        ("producer", records.producers),
        ("consumer", records.consumers),
        ("peer", records.engines),
        ("peer", records.workers),
    ]
    for machine, table in everything:
        for record in table.values():  # type: ignore[attr-defined]
            counted[machine, record.state] = counted.get((machine, record.state), 0) + 1
    kept = {pair: count for pair, count in records.population.items() if count}
    _check(kept == counted, "books", f"{node.agent}: population {kept}, but {counted}")
    counts_agree(node)
    for engine in records.engines.values():
        for key in engine.using:
            asking = records.consumers[RequestId(key)].state in consumer.ASKING
            _check(asking, "books", f"{node.agent}: {key} uses {engine.key}, but asks nothing")


def counts_agree(node: "Node") -> None:
    """T4: every start has one end, and every registration that was received one fate."""
    records, tally = node.engine.records, node.engine.tally
    for table in TABLES:
        if not table.terminal:
            continue
        over = table.terminal | {table.initial, "forgotten"}
        live = sum(
            count
            for (machine, state), count in records.population.items()
            if machine == table.name and state not in over
        )
        ended = sum(count for (name, _, _), count in tally.ended.items() if name == table.name)
        said = f"{node.agent}: of {table.name}: {tally.started[table.name]}, {ended}, {live}"
        _check(tally.started[table.name] == ended + live, "T4", said)
    pending = [
        record
        for record in records.producers.values()
        if record.registration is not None and not record.is_counted
    ]
    settled = sum(tally.registrations.values())
    said = f"{node.agent}: {tally.received} registrations, {tally.registrations}, {len(pending)}"
    _check(tally.received == settled + len(pending), "T4", said)
