"""Scenarios as transcripts: a prompt is written stretch by stretch while vLLM computes it.

Each line is `time worker: what happened`. The first word after a name says which machine moved. The
prompt has five blocks of 16 tokens in its first cache group.
"""

from kvflow.core import Timings
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.testing import bench as b
from kvflow.testing.bench import C1, Bench
from kvflow.testing.faults import Faults
from kvflow.testing.prefill_engine import Producer
from kvflow.testing.prompts import Prefill
from kvflow.testing.scenes import T, acquainted, both_legs
from kvflow.testing.sizes import BLOCK_TOKENS, blocks_of, tokens_of
from kvflow.testing.transcript import check
from kvflow.testing.world import World


def compute(world: World, producer: Producer, prefill: Prefill, *blocks: int) -> None:
    """vLLM's steps, each so many blocks of tokens, ten milliseconds apart."""
    for count in blocks:
        producer.advance(prefill, count * BLOCK_TOKENS)
        world.advance(0.01)


def orders(bench: Bench) -> list[tuple[int, int]]:
    """What was to be written so far: (moved, tokens) of each order."""
    return [(each.moved, each.tokens) for each in bench.effects if isinstance(each, ef.PostWrite)]


# -- the way it goes -------------------------------------------------------------------------------


def test_each_step_is_written_and_the_consumer_has_all_before_vllm_ends_the_request() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    blocks = blocks_of(T)[0]
    compute(world, producer, prefill, 1, blocks - 1)
    assert load.state == "received"
    producer.finish(prefill)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_advanced--> streaming
        1.011 P: producer t --write_done--> registered
        1.020 P: producer t --prefill_advanced--> streaming
        1.022 P: producer t --write_done--> sent
        1.023 C: told vLLM that C.c4 has its KV
        1.023 C: consumer t --done--> received
        1.030 P: told vLLM that P.p3 may be freed
        """,
        since=1.0,
    )
    world.everything_ends()


def test_what_is_complete_when_the_consumer_registers_goes_at_once() -> None:
    world, producer, consumer = acquainted()
    prefill = producer.begin(T)
    assert prefill
    compute(world, producer, prefill, 2)
    consumer.allocate(T, producer)
    world.advance(0.01)
    producer.finish(prefill)
    world.advance(0.01)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.010 C: consumer t --blocks_allocated--> allocated
        1.010 C: consumer t --peer_met--> registering
        1.011 P: producer t --registered--> streaming
        1.012 C: consumer t --accepted--> transferring
        1.012 P: producer t --write_done--> registered
        1.020 P: producer t --prefill_finished--> transferring
        1.022 P: told vLLM that P.p3 may be freed
        1.022 P: producer t --write_done--> sent
        1.023 C: told vLLM that C.c4 has its KV
        1.023 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_the_end_of_the_prompt_comes_while_a_stretch_is_being_written() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    producer.advance(prefill, BLOCK_TOKENS)
    producer.finish(prefill)
    world.advance(0.02)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_advanced--> streaming
        1.010 P: producer t --prefill_finished--> transferring
        1.014 P: told vLLM that P.p3 may be freed
        1.014 P: producer t --write_done--> sent
        1.015 C: told vLLM that C.c4 has its KV
        1.015 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_what_is_to_be_kept_is_vllms_to_give_first() -> None:
    world, producer, consumer = acquainted(timings=Timings(keep_sent_s=5.0), registers=True)
    prefill, load = both_legs(producer, consumer)
    compute(world, producer, prefill, blocks_of(T)[0])
    assert load.state == "loading"
    producer.finish(prefill)
    world.advance(0.01)
    assert load.state == "received"
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_advanced--> streaming
        1.012 P: producer t --write_done--> registered
        1.020 P: producer t --prefill_finished--> transferring
        1.020 P: producer t --write_done--> kept
        1.021 C: told vLLM that C.c4 has its KV
        1.021 C: consumer t --done--> received
        """,
        since=1.0,
    )
    consumer.finish(load)
    world.everything_ends()


# -- what is taken away ----------------------------------------------------------------------------


def test_a_preempted_prompt_is_sent_from_its_start_when_its_write_has_ended() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    compute(world, producer, prefill, 2)
    world.faults = Faults(slow_slices=1.0)
    producer.advance(prefill, 2 * BLOCK_TOKENS)
    producer.preempt(prefill)
    world.advance(0.4)
    world.faults = Faults()
    producer.resume(prefill)
    compute(world, producer, prefill, 3)
    producer.finish(prefill)
    world.advance(0.01)
    assert load.state == "received"
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_advanced--> streaming
        1.011 P: producer t --write_done--> registered
        1.020 P: producer t --prefill_advanced--> streaming
        1.020 P: producer t --prefill_preempted--> recalled
        1.238 P: producer t --write_done--> held
        1.420 P: producer t --prefill_started--> registered
        1.420 P: producer t --prefill_advanced--> streaming
        1.421 P: producer t --write_done--> registered
        1.430 P: producer t --prefill_finished--> transferring
        1.432 P: told vLLM that P.p3 may be freed
        1.432 P: producer t --write_done--> sent
        1.433 C: told vLLM that C.c4 has its KV
        1.433 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_prompt_that_is_resumed_before_the_old_write_has_ended_waits_for_it() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    world.faults = Faults(slow_slices=1.0)
    producer.advance(prefill, 3 * BLOCK_TOKENS)
    producer.preempt(prefill)
    producer.resume(prefill)
    producer.finish(prefill)
    world.faults = Faults()
    world.advance(1.0)
    assert load.state == "received"
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_advanced--> streaming
        1.010 P: producer t --prefill_preempted--> recalled
        1.010 P: producer t --prefill_started--> streaming
        1.010 P: producer t --prefill_finished--> transferring
        1.117 P: told vLLM that P.p3 may be freed
        1.117 P: producer t --write_done--> sent
        1.118 C: told vLLM that C.c4 has its KV
        1.118 C: consumer t --done--> received
        """,
        since=1.0,
    )
    world.everything_ends()


def test_an_aborted_prompt_fails_its_load_when_the_write_has_ended() -> None:
    world, producer, consumer = acquainted()
    prefill, _ = both_legs(producer, consumer)
    compute(world, producer, prefill, 2)
    world.faults = Faults(slow_slices=1.0)
    producer.advance(prefill, 2 * BLOCK_TOKENS)
    producer.abort(prefill)
    world.advance(0.5)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_advanced--> streaming
        1.011 P: producer t --write_done--> registered
        1.020 P: producer t --prefill_advanced--> streaming
        1.020 P: producer t --prefill_aborted--> draining (aborted)
        1.238 P: producer t --write_done--> failed (aborted)
        1.239 C: told vLLM that C.c4 failed (aborted)
        1.239 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=1.0,
    )
    world.everything_ends()


def test_a_cancelled_stretch_leaves_the_prompt_to_vllm() -> None:
    world, producer, consumer = acquainted()
    prefill, load = both_legs(producer, consumer)
    world.faults = Faults(slow_slices=1.0)
    producer.advance(prefill, 2 * BLOCK_TOKENS)
    consumer.abort(load)
    world.advance(0.01)
    producer.finish(prefill)
    world.faults = Faults()
    world.advance(1.0)
    check(
        world,
        """
        1.000 P: producer t --prefill_started--> allocated
        1.000 C: consumer t --blocks_allocated--> allocated
        1.000 C: consumer t --peer_met--> registering
        1.001 P: producer t --registered--> registered
        1.002 C: consumer t --accepted--> registered
        1.010 P: producer t --prefill_advanced--> streaming
        1.010 C: consumer t --load_aborted--> draining (aborted)
        1.011 P: producer t --cancel_asked--> draining (cancelled)
        1.114 P: told vLLM that P.p3 may be freed
        1.114 P: producer t --write_done--> failed (cancelled)
        1.115 C: told vLLM that C.c4 failed (aborted)
        1.115 C: consumer t --rank_failed--> failed (aborted)
        """,
        since=1.0,
    )
    assert prefill.state == "over"
    world.everything_ends()


# -- what is written, order by order ---------------------------------------------------------------


def test_no_token_is_written_twice_unless_it_has_to_be() -> None:
    bench = Bench()
    bench.introduce()
    bench.hear(C1, b.register())
    bench.take(b.started(), b.advanced(tokens=1), b.advanced(tokens=2))
    assert orders(bench) == [(0, 1)]
    bench.take(b.written())
    assert orders(bench) == [(0, 1), (1, 2)]
    bench.take(b.written(), b.finished())
    assert orders(bench) == [(0, 1), (1, 2), (2, b.TOKENS)]


def test_a_failed_stretch_makes_the_next_attempt_start_from_the_first_token() -> None:
    bench = Bench()
    bench.introduce()
    bench.hear(C1, b.register())
    bench.take(b.started(), b.advanced(tokens=1), b.written(), b.advanced(tokens=2))
    bench.take(ev.WriteFailed(part=b.PART, attempt=5, detail="EIO"))
    assert bench.produced == "allocated"
    bench.hear(C1, b.register(6))
    assert orders(bench)[-1] == (0, 2)


def test_a_stretch_that_the_consumer_has_already_is_not_written() -> None:
    world, producer, consumer = acquainted()
    prefill = producer.begin(T)
    load = consumer.allocate(T, producer, skip=2)
    world.advance(0.01)
    assert prefill
    assert load
    compute(world, producer, prefill, 1)
    moved = [e for _, _, e in world.log if isinstance(e, ef.Moved) and e.key == T]
    assert "streaming" not in {each.dest for each in moved}
    producer.finish(prefill)
    world.advance(0.01)
    assert load.state == "received"
    assert tokens_of(T) > BLOCK_TOKENS
    world.everything_ends()
