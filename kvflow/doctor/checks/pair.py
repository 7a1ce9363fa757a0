"""Two engines: who they are, and whether KV moves between them.

Asked of the same code that refuses at the meeting (`Identity.writers`, `Identity.pairing`), rank by
rank, so what is right here is right there.
"""

from collections.abc import Iterator, Sequence

from kvflow.doctor.checks.listening import reached
from kvflow.doctor.checks.rdma import in_bytes
from kvflow.doctor.facts import Reach, Side
from kvflow.doctor.findings import Finding, breaks, note, ok, warning
from kvflow.errors import IncompatiblePeersError, RemoteProtocolError
from kvflow.ids import Incarnation, Rank
from kvflow.io.coordinates import Identity, facts_of, rank_of, regions_of
from kvflow.io.nixl_port import registered_ranges
from kvflow.layout import Facts
from kvflow.wire import messages as m

_TO_DO = (
    ("model", "Start both engines with the same model and revision (--model, --revision)."),
    ("KV cache dtype", "Give both the same --kv-cache-dtype (and --dtype, where that is auto)."),
    (
        "kinds of cache groups",
        "Give both the same vLLM and the same settings of the hybrid cache manager.",
    ),
    (
        "tensor-parallel size",
        "Choose --tensor-parallel-size so that one divides the other.",
    ),
    (
        "pipeline-parallel size",
        "Give both the same --pipeline-parallel-size, or one of them 1.",
    ),
    ("heads", "Choose --tensor-parallel-size so that it divides the KV heads, or they it."),
    (
        "tokens per block",
        "Give both the same --block-size, or sizes whose common divisor is whole tiles.",
    ),
    (
        "tile",
        "Give both the same --block-size and --attention-backend: these kernels permute the tokens "
        "of a block.",
    ),
    (
        "encoding",
        "Give both the same --dtype, --kv-cache-dtype and --attention-backend.",
    ),
    ("ranks", "Wait until all workers of the producer have started, or start it again."),
    ("layers", "Start both with the same model, and with the same drafter, if there is one."),
)
_OTHERWISE = "Give both the same vLLM, model, --dtype, --kv-cache-dtype and --attention-backend."


def check(producer: Side | None, consumer: Side | None) -> Iterator[Finding]:
    """Each side by itself, then both together."""
    sides = [side for side in (producer, consumer) if side is not None]
    garbled = {side.name: _garbled(side) for side in sides}
    for side in sides:
        if garbled[side.name]:
            yield _makes_no_sense(side, garbled[side.name])
        else:
            yield from _alone(side)
    if producer is None or consumer is None:
        return
    unknown = " and ".join(side.name for side in sides if not side.ranks or garbled[side.name])
    if not unknown:
        yield from _together(producer, consumer)
    else:
        yield warning(
            f"The pair was not compared: nothing is known of the {unknown}.",
            "Whether KV moves between them will be seen by the first request.",
            "See what is said of it above; or give --producer-config and --consumer-config.",
        )


def _garbled(side: Side) -> str:
    """What makes no sense of what it tells; "" if all does."""
    try:
        for hello in side.ranks:
            regions_of(hello)
    except RemoteProtocolError as error:
        return str(error)
    return ""


def _makes_no_sense(side: Side, error: str) -> Finding:
    return breaks(
        f"What the {side.name} at {side.where} tells of its memory makes no sense: {error}.",
        "Each meeting with it ends so, and each load.",
        "Install the same kvflow for both engines, and here.",
    )


def _alone(side: Side) -> Iterator[Finding]:
    who = f"{side.name} at {side.where}"
    if side.reached is not None and side.reached.reach is not Reach.CONNECTED:
        if side.name == "consumer" and side.reached.reach is Reach.REFUSED:
            yield warning(
                f"The {who} refuses connections.",
                "An engine with kv_role kv_consumer has no side channel, so this is as it should "
                "be for one; for kv_both, it is not up, or listens elsewhere.",
                "Describe both engines instead (--producer-config, --consumer-config), or give "
                "the consumer kv_role kv_both while it is checked.",
            )
        else:
            yield reached(side.reached)
        return
    if side.error:
        yield _not_met(side)
        return
    if not side.ranks:
        yield breaks(
            f"The {who} (engine {side.engine_id}) knows none of its workers.",
            "Consumers that meet it now find nobody to load from.",
            "Wait until it has started (its /health answers 200), or start it again.",
        )
        return
    facts = facts_of(side.ranks[0])
    yield ok(f"The {who}: {_in_words(side, facts)}.", "That is what it tells its peers.")
    missing = sorted(
        {Rank(pp, tp) for pp in range(facts.pp_size) for tp in range(facts.tp_size)}
        - {rank_of(hello) for hello in side.ranks}
    )
    if missing:
        yield breaks(
            f"The {who} lacks {', '.join(map(str, missing))} of {facts.tp_size} x "
            f"{facts.pp_size} ranks.",
            "What those ranks hold cannot be loaded: a consumer that needs it refuses the engine.",
            "Wait until all workers have started; else see their logs.",
        )


def _not_met(side: Side) -> Finding:
    found = f"The {side.name} at {side.where} takes connections, but is not met: {side.error}."
    to_do = "Give the address of its side channel (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT)."
    why = "A consumer is refused in the same way, and each of its loads fails."
    if "protocol version" in side.error:
        to_do = "Install the same kvflow for both engines, and here."
    elif "without a seal" in side.error:
        to_do = "Leave --shared-key-file out, or set shared_key_file at that engine as well."
    elif "seal" in side.error or "key" in side.error:
        to_do = "Give --shared-key-file the file of the engines' setting shared_key_file."
    elif "did not answer" in side.error:
        why = "Something listens there that does not speak kvflow's protocol, or hangs."
    return breaks(found, why, to_do)


def _in_words(side: Side, facts: Facts) -> str:
    ranges = registered_ranges(regions_of(side.ranks[0]))
    pool = sum(each.stop - each.start for each in ranges)
    ranks = len(side.ranks)
    engine = f"engine {side.engine_id}, " if side.engine_id else ""
    return (
        f"{engine}protocol {m.PROTOCOL_VERSION}, model {facts.model}, KV {facts.kv_dtype}, blocks "
        f"of {_plain(facts.block_sizes)} tokens, layout {facts.kv_layout}, TP {facts.tp_size}, "
        f"PP {facts.pp_size}, "
        f"{ranks} rank{'' if ranks == 1 else 's'}, {_memory(side)} ({in_bytes(pool)} in rank "
        f"{rank_of(side.ranks[0])})"
    )


def _together(producer: Side, consumer: Side) -> Iterator[Finding]:
    if producer.engine_id and producer.engine_id == consumer.engine_id:
        yield warning(
            f"Both sides are engine {producer.engine_id}.",
            "An engine does not load from itself.",
            "Give two addresses, of two engines.",
        )
    refusals = dict.fromkeys(_refusals(producer.ranks, consumer.ranks))
    for field, ours, theirs in refusals:
        yield breaks(
            f"KV does not move: {field} is {ours} at the producer and {theirs} at the consumer.",
            "The two refuse each other at their first meeting, and every load between them fails.",
            next((to_do for start, to_do in _TO_DO if field.startswith(start)), _OTHERWISE),
        )
    if not refusals:
        ranks = f"ranks: {len(producer.ranks)} and {len(consumer.ranks)}"
        yield ok(f"KV moves from producer to consumer ({ranks}).", "The meeting will not refuse.")
        yield from _differences(facts_of(producer.ranks[0]), facts_of(consumer.ranks[0]))
        yield from _memories(_memory(producer), _memory(consumer))


def _refusals(
    producers: Sequence[m.Hello], consumers: Sequence[m.Hello]
) -> Iterator[tuple[str, str, str]]:
    """Field, the producer's value, the consumer's; the same may come several times."""
    for hello in consumers:
        consumer = _identity(hello)
        try:
            writers = consumer.writers(producers)
        except IncompatiblePeersError as error:
            yield error.field, str(error.theirs), str(error.ours)
            continue
        for writer in writers.values():
            try:
                _identity(writer).pairing(hello)
            except IncompatiblePeersError as error:
                yield error.field, str(error.ours), str(error.theirs)


def _differences(ours: Facts, theirs: Facts) -> Iterator[Finding]:
    """That are allowed, and cost something."""
    for name, mine, other in (
        ("block sizes", ours.block_sizes, theirs.block_sizes),
        ("layouts", ours.kv_layout, theirs.kv_layout),
        ("tensor-parallel sizes", ours.tp_size, theirs.tp_size),
    ):
        if mine != other:
            yield note(
                f"The {name} differ: {_plain(mine)} at the producer, {_plain(other)} at the "
                "consumer.",
                "That works; the KV is moved in more and shorter runs than between equals.",
                "Nothing, or make them equal where time to first token counts; kvflow plan shows "
                "the runs.",
            )


def _memories(ours: str, theirs: str) -> Iterator[Finding]:
    if ours != theirs:
        yield note(
            f"The kinds of memory differ: {ours} at the producer, {theirs} at the consumer.",
            "NIXL moves between them, but other transports may carry it than between equals.",
            "Nothing, if it is meant (kv_buffer_device cpu, or an engine without a GPU).",
        )


def _memory(side: Side) -> str:
    """Of its regions: "VRAM" or "DRAM"."""
    regions = (region for hello in side.ranks for region in hello.regions)
    return " and ".join(sorted({region.memory for region in regions}))


def _plain(value: object) -> str:
    """A tuple as its numbers, or as the one that it has of all groups."""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(map(str, value if len(set(value)) > 1 else value[:1]))


def _identity(hello: m.Hello) -> Identity:
    return Identity(
        engine_id=hello.engine_id,
        incarnation=Incarnation(hello.incarnation),
        rank=rank_of(hello),
        facts=facts_of(hello),
        regions=regions_of(hello),
    )
