"""Engines that are killed, paused, ended or restarted while they exchange KV.

After each fault: what lives serves the next request with right tokens, its pool is empty within
a bound, every load has ended in time, and no answer has a wrong token.
"""

import asyncio
import os
import random
import signal
import time

import pytest

from kvflow.demo.requests import Completion, Dispatch, Naming

from .bursts import (
    BIG,
    CONSUMERS,
    LONG,
    ONE,
    SMALL,
    TOKENS_EXPECTED,
    Clients,
    burst,
    complete,
    in_the_middle,
    run,
    tell_ends,
)
from .trio import (
    DRAIN_S,
    FAILS,
    LEASE_S,
    LOSS_S,
    PRODUCER,
    RECOMPUTES,
    Prompt,
    Sent,
    Trio,
    note,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]

SEED = int(os.environ.get("KVFLOW_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@pytest.fixture
def healed(trio: Trio) -> Trio:
    """All three run, with their usual settings, and it is known what they should say."""
    print(f"KVFLOW_SEED={SEED}")

    async def prepare() -> None:
        await trio.heal()
        began = time.monotonic()
        await trio.expect(
            [p for p in (*LONG, *BIG, *SMALL) if p not in trio.expected], TOKENS_EXPECTED
        )
        note(f"{len(trio.expected)} prompts known after {time.monotonic() - began:.1f} s")

    asyncio.run(prepare())
    return trio


# -- the producer dies ---------------------------------------------------------------------------


def test_a_producer_killed_before_it_writes_fails_its_loads_in_time(healed: Trio) -> None:
    trio = healed

    async def work(clients: Clients) -> None:
        finished = {name: Naming.by_transfer_id() for name in CONSUMERS}
        for naming in finished.values():
            answer = await clients[FAILS].prefill_leg(ONE, naming)
            assert answer.error is None
        computed = [trio.send(clients[name], name, LONG[i]) for i, name in enumerate(CONSUMERS)]
        held = {name: Naming.by_transfer_id() for name in CONSUMERS}
        unanswered = {
            name: asyncio.create_task(clients[name].decode_leg(SMALL[7], naming))
            for name, naming in held.items()
        }
        await until(
            lambda: (
                all(
                    trio.traces.reached(PRODUCER, s.transfer_id, "registered", "streaming")
                    and trio.traces.reached(s.consumer, s.transfer_id, *trio.way.waiting)
                    for s in computed
                )
                and all(
                    trio.traces.reached(PRODUCER, str(naming.transfer_id), "held")
                    and trio.traces.reached(name, str(naming.transfer_id), *trio.way.waiting)
                    for name, naming in held.items()
                )
            ),
            within_s=30,
            what="registered before the prefill has ended",
        )
        killed_unix, killed = trio.mark(), trio.signal(PRODUCER, signal.SIGKILL)
        late = {
            name: asyncio.create_task(clients[name].decode_leg(ONE, naming))
            for name, naming in finished.items()
        }
        for each in computed:
            assert not trio.traces.reached(
                PRODUCER, each.transfer_id, "transferring", "lent", "sent"
            )
            await each.exchange
            trio.assert_failed_as_configured(each.consumer, each.prompt, each.decode)
        assert (
            max(tell_ends(trio, computed, killed, killed_unix).values()) <= LOSS_S + trio.slack_s()
        )
        for what, prompt, legs, namings in (
            ("held", SMALL[7], unanswered, held),
            ("prefilled", ONE, late, finished),
        ):
            for name, leg in legs.items():
                answer = await leg
                trio.assert_failed_as_configured(name, prompt, answer)
                failure = trio.traces.failure(name, str(namings[name].transfer_id))
                assert failure is not None
                note(f"{what}, {name}: {failure.reason} after {failure.at - killed_unix:.2f} s")
                assert failure.at - killed_unix <= LOSS_S + trio.slack_s()
        await trio.assert_empty(3, *CONSUMERS)
        await trio.assert_serve_alone(clients[FAILS], CONSUMERS, ONE)
        await a_load_from_nobody_ends(trio, clients)

        # Loads go on failing while the producer is away, so the consumer backs off from it.
        trying = asyncio.create_task(try_until_cancelled(clients))
        await trio.restart(trio.settings(PRODUCER))
        trying.cancel()
        outcomes = await asyncio.gather(trying, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        await trio.assert_serves(clients, ONE)
        await trio.assert_empty(3 + LEASE_S, *trio.engines)

    run(trio, work)


async def a_load_from_nobody_ends(trio: Trio, clients: Clients) -> None:
    """The producer is known to be gone, and nobody listens on its side channel."""
    for name in CONSUMERS:
        naming = Naming.by_transfer_id()
        trio.mark()
        answer = await clients[name].decode_leg(ONE, naming)
        slack_s = trio.slack_s()
        trio.assert_failed_as_configured(name, ONE, answer)
        failure = trio.traces.failure(name, str(naming.transfer_id))
        assert failure is not None
        took_s = failure.at - trio.traces.steps(name, str(naming.transfer_id))[0].at
        note(
            f"{name}: nobody listens: {failure.reason} after {took_s:.2f} s, slack {slack_s:.2f} s;"
            f" answered after {answer.total_s:.2f} s"
        )
        assert took_s <= LOSS_S + slack_s


async def try_until_cancelled(clients: Clients) -> None:
    while True:
        await clients[FAILS].decode_leg(SMALL[0], Naming.by_transfer_id())


def test_a_producer_killed_amid_ten_transfers_fails_those_that_it_owes(healed: Trio) -> None:
    trio = healed

    async def work(clients: Clients) -> None:
        sent = burst(trio, clients, {FAILS: 10, RECOMPUTES: 10})
        await in_the_middle(trio, sent, *CONSUMERS)
        killed_unix, killed = trio.mark(), trio.signal(PRODUCER, signal.SIGKILL)
        await asyncio.gather(*(s.exchange for s in sent))
        assert max(tell_ends(trio, sent, killed, killed_unix).values()) <= LOSS_S + trio.slack_s()
        for each in sent:
            trio.assert_as_configured(each.consumer, each.prompt, each.decode)
            if each.consumer == FAILS and each.decode.error:
                assert each.ended - killed <= LOSS_S + trio.slack_s()
        assert any(s.decode.error for s in sent), "killed too late: nothing failed"
        await trio.assert_empty(3, *CONSUMERS)
        await trio.assert_serve_alone(clients[FAILS], CONSUMERS, ONE)
        await trio.restart(trio.settings(PRODUCER))
        await trio.assert_serves(clients, BIG[0])
        await trio.assert_empty(3 + LEASE_S, *trio.engines)

    run(trio, work)


# -- the consumer dies ---------------------------------------------------------------------------


def test_a_killed_consumer_costs_the_producer_its_blocks_for_a_lease_at_most(healed: Trio) -> None:
    trio = healed

    async def work(clients: Clients) -> None:
        held = Naming.by_transfer_id()
        waiting = asyncio.create_task(clients[FAILS].decode_leg(ONE, held))
        await until(
            lambda: trio.traces.reached(PRODUCER, str(held.transfer_id), "held"),
            within_s=30,
            what="a registration is held",
        )
        sent = burst(trio, clients, {FAILS: 6, RECOMPUTES: 4})
        await in_the_middle(trio, sent, FAILS)
        killed_unix, killed = trio.mark(), trio.signal(FAILS, signal.SIGKILL)
        await asyncio.gather(waiting, *(s.exchange for s in sent))
        for each in sent:
            if each.consumer == RECOMPUTES:
                assert trio.traces.failure(RECOMPUTES, each.transfer_id) is None
                trio.assert_right(each.prompt, each.decode)
            prefill = each.exchange.result().prefill
            assert prefill.error is None
        note(f"the last prefill was answered {time.monotonic() - killed:.2f} s after the kill")
        await trio.assert_empty(LEASE_S + 3, PRODUCER, RECOMPUTES)
        note(f"producer empty {time.monotonic() - killed:.2f} s after the kill, lease {LEASE_S} s")
        for each in (*(s.transfer_id for s in sent if s.consumer == FAILS), str(held.transfer_id)):
            for step in trio.traces.steps(PRODUCER, each):
                if step.at > killed_unix:
                    what = f"{step.trigger} -> {step.dest} {step.reason or ''}"
                    note(f"producer: {what} {step.at - killed_unix:.2f} s after the kill")
        # Not by its lease: the producer asked.
        failure = trio.traces.failure(PRODUCER, str(held.transfer_id))
        assert failure is not None
        assert failure.trigger == "peer_lost"
        await trio.restart(trio.settings(FAILS))
        await trio.assert_serves(clients, BIG[0])
        await trio.assert_empty(3, *trio.engines)

    run(trio, work)


# -- pauses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_s", [3.0, 8.0])
@pytest.mark.parametrize("paused", [PRODUCER, FAILS])
def test_a_pause_amid_transfers_makes_no_token_wrong(
    healed: Trio, paused: str, pause_s: float
) -> None:
    trio = healed

    async def work(clients: Clients) -> None:
        sent = burst(trio, clients, {FAILS: 6, RECOMPUTES: 6})
        await in_the_middle(trio, sent, FAILS)
        stopped_unix, stopped = trio.mark(), trio.signal(paused, signal.SIGSTOP)
        alone: list[tuple[Prompt, asyncio.Task[Completion]]] = []
        try:
            if pause_s > LOSS_S + 1 and paused == PRODUCER:
                await asyncio.sleep(LOSS_S + 0.2)
                # Takes the blocks of the failed loads, and still runs when the producer wakes.
                alone = [
                    (prompt, asyncio.create_task(complete(clients[name], trio, name, prompt)))
                    for prompt in BIG[:8]
                    for name in CONSUMERS
                ]
            await asyncio.sleep(max(0.0, stopped + pause_s - time.monotonic()))
        finally:
            trio.signal(paused, signal.SIGCONT)
        await asyncio.gather(*(s.exchange for s in sent))
        tell_ends(trio, sent, stopped, stopped_unix)
        for each in sent:
            trio.assert_as_configured(each.consumer, each.prompt, each.decode)
        for prompt, answer in alone:
            trio.assert_right(prompt, await answer, TOKENS_EXPECTED)
        await trio.assert_empty(LEASE_S + 3, *trio.engines)
        await trio.assert_serves(clients, BIG[1])

    run(trio, work)


# -- clients that go, ids that collide -----------------------------------------------------------


def test_of_two_hundred_requests_half_are_cut_and_the_others_are_right(healed: Trio) -> None:
    trio = healed
    source = random.Random(SEED)
    limit = asyncio.Semaphore(10)

    async def one(clients: Clients, number: int, is_cut: bool) -> str:
        name = CONSUMERS[number % 2]
        prompt, dispatch = source.choice(SMALL), source.choice(list(Dispatch))
        after_s = source.expovariate(1 / 0.15)
        async with limit:
            sent = trio.send(clients[name], name, prompt, dispatch=dispatch)
            if not is_cut:
                await sent.exchange
                trio.assert_right(prompt, sent.decode)
                return "whole"
            return await cut(trio, sent, after_s)

    async def work(clients: Clients) -> None:
        which = [True] * 100 + [False] * 100
        source.shuffle(which)
        began = time.monotonic()
        ends = await asyncio.gather(*(one(clients, i, c) for i, c in enumerate(which)))
        counts = {end: ends.count(end) for end in sorted(set(ends))}
        note(f"{counts} in {time.monotonic() - began:.1f} s")
        await trio.assert_empty(4, *trio.engines)
        await trio.assert_serves(clients, ONE)

    run(trio, work)


async def cut(trio: Trio, sent: Sent, after_s: float) -> str:
    """The client goes away at some moment, and its router says so; returns how far it had come."""
    await asyncio.wait([sent.exchange], timeout=after_s)
    if sent.exchange.done():
        return "answered before the cut"
    last = [trio.traces.last(name, sent.transfer_id) for name in (PRODUCER, sent.consumer)]
    sent.exchange.cancel()
    await asyncio.gather(sent.exchange, return_exceptions=True)
    await trio.release(sent.transfer_id)
    return "cut while {}, {}".format(*(step.dest if step else "unknown" for step in last))


def test_one_request_id_for_two_prompts_gives_neither_the_others_tokens(healed: Trio) -> None:
    trio = healed
    first, second = SMALL[9], SMALL[10]

    async def work(clients: Clients) -> None:
        for dispatch in Dispatch:
            for one, other in ((FAILS, FAILS), (RECOMPUTES, RECOMPUTES), (FAILS, RECOMPUTES)):
                for pause_s in (0.0, 0.05, 0.3):
                    naming = Naming.by_request_id()
                    here = trio.send(clients[one], one, first, dispatch=dispatch, naming=naming)
                    await asyncio.sleep(pause_s)
                    there = trio.send(
                        clients[other], other, second, dispatch=dispatch, naming=naming
                    )
                    await asyncio.gather(here.exchange, there.exchange)
                    for each in (here, there):
                        trio.assert_as_configured(each.consumer, each.prompt, each.decode)
                    outcomes = ["error" if s.decode.error else "right" for s in (here, there)]
                    times = [f"{s.decode.total_s:.2f} s" for s in (here, there)]
                    note(f"{dispatch.value} {one} {other} {pause_s} s: {outcomes} {times}")
        await trio.assert_empty(LEASE_S + 3, *trio.engines)
        await trio.assert_serves(clients, ONE)

    run(trio, work)


def test_a_decode_leg_with_another_prompts_id_does_not_get_its_kv_s6(healed: Trio) -> None:
    """Both are of one length, and the other request's own decode leg has not come (yet)."""
    trio = healed
    first, second = BIG[:2]

    async def work(clients: Clients) -> None:
        for name, client in clients.items():
            naming = Naming.by_transfer_id()
            prefill = await client.prefill_leg(first, naming)
            assert prefill.error is None
            decode = await client.decode_leg(second, naming, began=time.monotonic())
            trio.assert_failed_as_configured(name, second, decode)
            failure = trio.traces.failure(name, str(naming.transfer_id))
            assert failure is not None
            assert (failure.reason, failure.detail) == ("ambiguous", "the KV is another prompt's")
        await trio.assert_empty(3, *trio.engines)

    run(trio, work)


# -- engines that are ended, or restarted while idle ---------------------------------------------


def test_an_engine_that_gets_sigterm_ends_in_time_and_nobody_waits_for_it(healed: Trio) -> None:
    trio = healed

    async def work(clients: Clients) -> None:
        for ended, other in ((FAILS, PRODUCER), (PRODUCER, RECOMPUTES)):
            living = {name: 6 for name in CONSUMERS if trio.engines[name].is_running()}
            unclaimed = await clients[RECOMPUTES].prefill_leg(ONE, Naming.by_transfer_id())
            assert unclaimed.error is None
            sent = burst(trio, clients, living)
            await in_the_middle(trio, sent, *living)
            told_unix, told = trio.mark(), time.monotonic()
            os.kill(trio.engines[ended].process.pid, signal.SIGTERM)
            answers = asyncio.gather(*(s.exchange for s in sent))
            engine = trio.engines[ended]
            took_s = await until(
                lambda engine=engine: not engine.is_running(), within_s=30, what="the end"
            )
            note(f"{ended} ended {took_s:.2f} s after SIGTERM")
            await answers
            tell_ends(trio, sent, told, told_unix)
            # On a slow machine its prompts take all of it, and what is left then ends as well.
            assert took_s <= DRAIN_S + LOSS_S + trio.slack_s()
            for each in sent:
                if each.consumer != ended:
                    trio.assert_as_configured(each.consumer, each.prompt, each.decode)
            await trio.assert_empty(LEASE_S + 3, *trio.living())
            note(f"{other} empty {time.monotonic() - told:.2f} s after SIGTERM to {ended}")
        await trio.assert_serve_alone(clients[RECOMPUTES], [RECOMPUTES], ONE)

    run(trio, work)


def test_an_engine_restarted_while_idle_is_used_at_once(healed: Trio) -> None:
    trio = healed

    async def work(clients: Clients) -> None:
        await trio.assert_serves(clients, ONE)
        trio.signal(PRODUCER, signal.SIGKILL)
        await trio.restart(trio.settings(PRODUCER))
        for name in CONSUMERS:
            for number in range(2):
                trio.mark()
                sent = trio.send(clients[name], name, ONE)
                await sent.exchange
                assert trio.traces.failure(name, sent.transfer_id) is None
                trio.assert_right(ONE, sent.decode)
                note(f"{name}, request {number + 1} after: {sent.decode.first_token_s:.3f} s")
                assert sent.decode.total_s < LOSS_S / 2 + trio.slack_s()
        await trio.assert_empty(3, *trio.engines)

    run(trio, work)
