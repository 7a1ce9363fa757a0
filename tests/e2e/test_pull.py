"""Real engines that read the KV: one consumer pulls, the other where a prefill has finished.

What is right, and how faults are timed: see `test_faults`.
"""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from kvflow.demo.requests import Client, Dispatch, Naming, prompts

from .bursts import CONSUMERS, Clients, run, tell_ends
from .trio import (
    FAILS,
    LEASE_S,
    LOSS_S,
    PRODUCER,
    RECOMPUTES,
    Sent,
    Trio,
    note,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]

EXTRA = {FAILS: {"mode": "pull"}, RECOMPUTES: {"mode": "auto", "recompute_below_tokens": 51}}
PROMPTS = prompts(6, shortest=64, longest=1500, seed=31)
LONG = prompts(4, shortest=4000, longest=4000, seed=32)
SHORT = prompts(1, shortest=50, longest=50, seed=33)[0]
"""One token less than what is worth a transfer."""


@pytest.fixture(scope="module")
def pulling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """A producer, a consumer that pulls, and one that decides by what it is told."""
    trio = Trio(directory=tmp_path_factory.mktemp("pulling"))

    async def start() -> None:
        consumers = [trio.settings(name, extra=EXTRA[name]) for name in CONSUMERS]
        await trio.start(trio.settings(PRODUCER), *consumers)
        await trio.expect([*PROMPTS, *LONG, SHORT], 16)

    try:
        asyncio.run(start())
        yield trio
    finally:
        trio.stop()


def was_read(trio: Trio, sent: Sent) -> bool:
    """And not written; by both sides' traces."""
    read = trio.traces.reached(sent.consumer, sent.transfer_id, "reading")
    assert read == trio.traces.reached(PRODUCER, sent.transfer_id, "lent")
    assert read != trio.traces.reached(PRODUCER, sent.transfer_id, "transferring", "streaming")
    return read


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("dispatch", Dispatch)
def test_tokens_are_right_whoever_moves_the_kv_s6(
    pulling: Trio, dispatch: Dispatch, together: bool
) -> None:
    async def work(clients: Clients) -> None:
        sent: list[Sent] = []
        for prompt in PROMPTS:
            for name in CONSUMERS:
                sent.append(pulling.send(clients[name], name, prompt, dispatch=dispatch))
                if not together:
                    await sent[-1].exchange
        await asyncio.gather(*(each.exchange for each in sent))
        await pulling.assert_empty(3, *pulling.engines)
        for each in sent:
            assert pulling.traces.failure(each.consumer, each.transfer_id) is None
            pulling.assert_right(each.prompt, each.decode)
            reads = each.consumer == FAILS or dispatch is Dispatch.SEQUENTIAL
            assert was_read(pulling, each) is reads

    run(pulling, work)


@pytest.mark.parametrize("dispatch", Dispatch)
def test_a_prompt_of_which_little_is_missing_is_computed_and_not_moved(
    pulling: Trio, dispatch: Dispatch
) -> None:
    async def work(clients: Clients) -> None:
        for name in CONSUMERS:
            sent = pulling.send(clients[name], name, SHORT, dispatch=dispatch)
            await sent.exchange
            pulling.assert_right(SHORT, sent.decode)
            received = pulling.traces.reached(name, sent.transfer_id, "received")
            assert received is (name == FAILS)
        await pulling.assert_empty(3, *pulling.engines)

    run(pulling, work)


def test_clients_that_go_away_leave_nothing_behind_and_nobody_gets_their_kv_f2(
    pulling: Trio,
) -> None:
    """Before there is anything to read, and while it is read or just was."""

    async def leave(client: Client, dispatch: Dispatch, after_s: float) -> None:
        leg = asyncio.create_task(
            client.disaggregated(LONG[0], dispatch=dispatch, naming=Naming.by_transfer_id())
        )
        await asyncio.sleep(after_s)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)

    async def work(clients: Clients) -> None:
        for round_ in range(3):
            for dispatch in Dispatch:
                gone = [leave(clients[FAILS], dispatch, 0.1 + 0.15 * n + round_) for n in range(4)]
                stay = [pulling.send(clients[FAILS], FAILS, prompt) for prompt in PROMPTS[:3]]
                await asyncio.gather(*gone, *(each.exchange for each in stay))
                for each in stay:
                    pulling.assert_right(each.prompt, each.decode)
        await pulling.assert_empty(3 + LEASE_S, *pulling.engines)

    run(pulling, work)


def test_a_producer_killed_before_and_while_it_is_read_from_fails_its_loads_in_time_f1(
    pulling: Trio,
) -> None:
    trio = pulling

    async def work(clients: Clients) -> None:
        finished = Naming.by_transfer_id()
        answer = await clients[FAILS].prefill_leg(PROMPTS[0], finished)
        assert answer.error is None
        sent = [trio.send(clients[FAILS], FAILS, prompt) for prompt in LONG]
        await until(
            lambda: any(trio.traces.reached(FAILS, each.transfer_id, "reading") for each in sent),
            within_s=60,
            what="one is being read, or was",
        )
        killed_unix, killed = trio.mark(), trio.signal(PRODUCER, signal.SIGKILL)
        late = asyncio.create_task(
            clients[FAILS].decode_leg(PROMPTS[0], finished, passed_on=answer.kv_transfer_params)
        )
        await asyncio.gather(*(each.exchange for each in sent))
        for each in sent:
            trio.assert_as_configured(FAILS, each.prompt, each.decode)
        assert tell_ends(trio, sent, killed, killed_unix)[FAILS] <= LOSS_S + trio.slack_s()
        assert (await late).error is not None
        failure = trio.traces.failure(FAILS, str(finished.transfer_id))
        assert failure is not None
        note(f"told of by its router: {failure.reason} after {failure.at - killed_unix:.2f} s")
        assert failure.at - killed_unix <= LOSS_S + trio.slack_s()
        await trio.assert_empty(3, *CONSUMERS)
        await trio.restart(trio.settings(PRODUCER))
        for name in CONSUMERS:
            for dispatch in Dispatch:
                again = trio.send(clients[name], name, PROMPTS[1], dispatch=dispatch)
                await again.exchange
                trio.assert_right(PROMPTS[1], again.decode)
                assert trio.traces.reached(name, again.transfer_id, "received")
        await trio.assert_empty(3 + LEASE_S, *trio.engines)

    run(trio, work)
