"""A worker's window and the side channel that tells of it, over real sockets."""

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvflow.errors import RemoteProtocolError, TransportError
from kvflow.ids import Address, TransferId
from kvflow.io import framing
from kvflow.io.framing import ask
from kvflow.io.seal import KEY_BYTES_MIN, Seal
from kvflow.io.side_channel import meet, release, windows
from kvflow.io.transfer_loop import TransferLoop
from kvflow.io.window import CONNECTIONS_MAX, Inspection
from kvflow.observe.history import History
from kvflow.testing.port import MemoryNetwork, MemoryPort
from kvflow.wire import codec, live
from kvflow.wire import messages as m

from .loops import FAST, WAIT_S, Worker, open_sockets, raised_by, wait_until
from .sides import DESTINATION, SOURCE, Memory, Notes, agent_of, identity
from .test_side_channel import say

SHOWN = replace(FAST, inspect=True)
NO_SEAL = Seal()
ONE, SAME, OTHER = Seal(b"k" * KEY_BYTES_MIN), Seal(b"k" * KEY_BYTES_MIN), Seal(b"o" * 16)
QUESTIONS = [live.LiveRequest(limit=10), live.InspectRequest(name="t")]


@pytest.fixture
def consumer(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("consumer", network, seed=2, settings=SHOWN, role="kv_consumer") as worker:
        yield worker


@pytest.fixture
def producer(network: MemoryNetwork) -> Iterator[Worker]:
    with Worker("producer", network, seed=1, settings=SHOWN) as worker:
        yield worker


def asked(
    address: Address | None, request: codec.Request, seal: Seal = NO_SEAL, timeout_s: float = WAIT_S
) -> codec.Answer:
    assert address is not None
    return asyncio.run(ask(address, request, timeout_s, seal))


def live_in(worker: Worker, limit: int = 100) -> live.Live:
    told = asked(worker.loop.window, live.LiveRequest(limit=limit))
    assert isinstance(told, live.Live)
    return told


def told_of(worker: Worker, name: str) -> live.Inspected:
    told = asked(worker.loop.window, live.InspectRequest(name=name))
    assert isinstance(told, live.Inspected)
    return told


# -- what is shown ---------------------------------------------------------------------------------


def test_a_load_that_waits_is_shown_with_whom_it_waits_for(
    producer: Worker, consumer: Worker
) -> None:
    producer.start_prefill("t")
    consumer.load("t", producer.address, DESTINATION)
    consumer.comes_to("consumer", "t", "registered")
    (row,) = live_in(consumer).transfers
    assert (row.transfer_id, row.state, row.waits_on) == ("t", "registered", "producer")
    assert producer.port.name in row.waits_for
    (record,) = told_of(consumer, "t").records
    assert record.history[-1].dest == "registered"
    (record,) = told_of(producer, "t").records
    assert (record.row.state, record.row.waits_on) == ("registered", "vllm")


def test_asking_disturbs_no_transfer(producer: Worker, consumer: Worker) -> None:
    for number in range(10):
        transfer = f"t{number}"
        consumer.load(transfer, producer.address, DESTINATION)
        live_in(consumer)
        producer.finish_prefill(transfer, SOURCE)
        live_in(producer)
        assert consumer.outcome(transfer) is None
    assert live_in(consumer).live == 0
    assert producer.notes.failures == consumer.notes.failures == []


def test_a_side_channel_says_who_it_is_and_where_its_workers_windows_are(
    producer: Worker, consumer: Worker
) -> None:
    for worker, role in ((producer, "kv_producer"), (consumer, "kv_consumer")):
        told = asyncio.run(windows(worker.address, WAIT_S))
        assert (told.engine_id, told.role) == (worker.name, role)
        (window,) = told.windows
        assert Address(window.host, window.port) == worker.loop.window


# -- who is refused --------------------------------------------------------------------------------


def test_without_the_setting_everything_is_refused_with_a_sentence_that_names_it(
    network: MemoryNetwork,
) -> None:
    with Worker("producer", network, seed=1) as worker:
        assert worker.loop.window is None
        for question in (live.WindowsRequest(), *QUESTIONS):
            with pytest.raises(RemoteProtocolError, match=r"`inspect`.*is off"):
                asked(worker.address, question)
        assert [kind for kind, _ in worker.notes.refusals] == ["request"] * 3
        assert asyncio.run(meet(worker.address, "asker", WAIT_S)).engine_id == "producer"


def test_a_side_channel_does_not_answer_for_its_workers(producer: Worker) -> None:
    for question in QUESTIONS:
        with pytest.raises(RemoteProtocolError, match="workers' windows is to be asked"):
            asked(producer.address, question)


def test_a_window_shows_and_does_nothing_else(producer: Worker) -> None:
    for question in (
        m.MeetRequest(engine_id="asker"),
        m.ReleaseRequest(transfer_id="t"),
        live.WindowsRequest(),
    ):
        with pytest.raises(RemoteProtocolError, match="only shows live transfers"):
            asked(producer.loop.window, question)


def test_a_consumer_that_listens_is_not_taken_for_a_producer(consumer: Worker) -> None:
    with pytest.raises(RemoteProtocolError, match="no KV to give"):
        asyncio.run(meet(consumer.address, "asker", WAIT_S))
    with pytest.raises(RemoteProtocolError, match="no KV to give"):
        asyncio.run(release(consumer.address, TransferId("t"), WAIT_S))


@pytest.mark.parametrize("seals", [(ONE, OTHER), (ONE, NO_SEAL), (NO_SEAL, ONE)])
def test_without_the_key_nothing_is_shown(network: MemoryNetwork, seals: tuple[Seal, Seal]) -> None:
    ours, theirs = seals
    with Worker("producer", network, seed=1, settings=SHOWN, seal=ours) as worker:
        for address, questions in (
            (worker.address, [live.WindowsRequest()]),
            (worker.loop.window, QUESTIONS),
        ):
            for question in questions:
                with pytest.raises(RemoteProtocolError, match=r"key|seal"):
                    asked(address, question, theirs)


def test_with_the_key_requests_and_replies_are_sealed(network: MemoryNetwork) -> None:
    with Worker("producer", network, seed=1, settings=SHOWN, seal=ONE) as worker:
        assert isinstance(asked(worker.address, live.WindowsRequest(), SAME), live.Windows)
        assert isinstance(asked(worker.loop.window, QUESTIONS[0], SAME), live.Live)
        assert worker.loop.window is not None
        request = ONE.close(codec.encode(QUESTIONS[0]), "side channel")
        framed = len(request).to_bytes(4, "big") + request
        raw = asyncio.run(say(worker.loop.window, framed))[4:]
        with pytest.raises(RemoteProtocolError):
            codec.decode_reply(raw)
        assert isinstance(codec.decode_reply(ONE.open(raw, "side channel")), live.Live)


# -- bounds ----------------------------------------------------------------------------------------


def test_no_more_rows_come_than_were_asked_for_and_all_are_counted(producer: Worker) -> None:
    for number in range(50):
        producer.start_prefill(f"t{number}")
    told = live_in(producer, limit=7)
    assert len(told.transfers) == 7
    assert told.live == 50
    assert [each.count for each in told.population] == [50]


@pytest.mark.parametrize("data", [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4, bytes(4)])
def test_hostile_bytes_do_not_close_a_window(producer: Worker, data: bytes) -> None:
    assert producer.loop.window is not None
    asyncio.run(say(producer.loop.window, data))
    assert live_in(producer).live == 0


def test_more_connections_than_the_limit_are_closed_and_a_slow_one_is_cut_off(
    producer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "_REQUEST_TIMEOUT_S", 0.5)
    window = producer.loop.window
    assert window is not None
    silent: list[socket.socket] = []

    def is_full() -> bool:
        """Those of an earlier try may have been cut off by now."""
        silent.extend(socket.create_connection(window) for _ in range(CONNECTIONS_MAX))
        return raised_by(lambda: live_in(producer)) is not None

    wait_until(is_full, "a connection too many")
    for each in silent:
        each.settimeout(WAIT_S)
        assert each.recv(1) == b""
        each.close()
    monkeypatch.undo()
    assert live_in(producer).live == 0


def test_many_may_ask_at_once(producer: Worker) -> None:
    for number in range(300):
        producer.start_prefill(f"t{number}")

    async def together() -> list[codec.Answer]:
        assert producer.loop.window is not None
        asking = [
            ask(producer.loop.window, live.LiveRequest(limit=300), WAIT_S, NO_SEAL)
            for _ in range(CONNECTIONS_MAX)
        ]
        return await asyncio.gather(*asking)

    told = asyncio.run(together())
    assert [len(each.transfers) for each in told if isinstance(each, live.Live)] == [
        300
    ] * CONNECTIONS_MAX


# -- its life --------------------------------------------------------------------------------------


def test_a_suspended_worker_says_so_and_shows_again_after_its_wake_up(
    producer: Worker, consumer: Worker
) -> None:
    before = producer.loop.window
    producer.start_prefill("t")
    producer.loop.suspend()
    for question in QUESTIONS:
        with pytest.raises(RemoteProtocolError, match="suspended"):
            asked(producer.loop.window, question)
    producer.open()
    assert producer.loop.window == before
    assert live_in(producer).live == 0
    consumer.load("u", producer.address, DESTINATION)
    consumer.comes_to("consumer", "u", "registered")
    assert [row.transfer_id for row in live_in(producer).transfers] == ["u"]


def test_a_closed_loop_leaves_no_socket_and_answers_nobody(network: MemoryNetwork) -> None:
    before = open_sockets()
    worker = Worker("producer", network, seed=1, settings=SHOWN)
    window = worker.loop.window
    assert window is not None
    assert live_in(worker).live == 0
    worker.close()
    with pytest.raises(TransportError):
        asked(window, QUESTIONS[0], timeout_s=5.0)
    wait_until(lambda: open_sockets() <= before, "descriptors closed")


def test_a_host_that_is_not_this_machines_is_an_error_at_start() -> None:
    network, notes = MemoryNetwork(), Notes()
    loop = TransferLoop(
        settings=SHOWN,
        make_port=lambda who: MemoryPort(agent_of(who), network),
        observer=notes,
        inspection=Inspection(host="192.0.2.1", history=History()),
    )
    try:
        with pytest.raises(TransportError, match=r"window of a worker.*192\.0\.2\.1"):
            loop.open(identity(Memory(seed=1), "engine"))
    finally:
        loop.close()


def test_without_the_setting_a_worker_listens_nowhere(network: MemoryNetwork) -> None:
    with Worker("one", network, seed=1) as plain, Worker("two", network, seed=2) as another:
        assert plain.loop.window is another.loop.window is None
        assert plain.notes.history is None
