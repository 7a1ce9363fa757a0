"""The engine's side channel: on which engines it listens, and what it says of the workers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from kvflow.connector.metadata import NewHellos, WorkerHello
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.errors import RemoteProtocolError, TransportError
from kvflow.ids import Address, Rank, TransferId
from kvflow.io.side_channel import meet, release, windows
from kvflow.settings import Settings
from kvflow.wire import codec

from .fakes import HELLO, PREFILL, FakeRequest, make, schedule, step


def test_only_a_producer_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    hellos = {(0, 0): WorkerHello(codec.encode(HELLO))}
    consumer, producer = make("kv_consumer"), make("kv_producer")
    consumer.introduce(hellos)
    producer.introduce(hellos)
    assert consumer.address.port == 0
    assert producer.address.port != 0
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(producer.address.port))
    with pytest.raises(TransportError, match=str(producer.address.port)):
        make("kv_producer").introduce(hellos)
    for half in (consumer, producer):
        half.close()
        half.close()


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
def test_every_engine_whose_transfers_may_be_inspected_listens(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says where each worker's window is."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    at = Address("127.0.0.1", 4711)
    hellos = {
        (0, 0): WorkerHello(codec.encode(HELLO), at),
        (0, 1): WorkerHello(codec.encode(HELLO), Address("127.0.0.1", 4712)),
    }
    half = make(role, Settings(inspect=True))
    half.introduce(hellos)
    try:
        told = asyncio.run(windows(half.address, 10.0))
        assert (told.engine_id, told.role) == ("engine-here", role)
        assert [(w.pp_rank, w.tp_rank, w.host, w.port) for w in told.windows] == [
            (0, 0, "127.0.0.1", 4711),
            (0, 1, "127.0.0.1", 4712),
        ]
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(half.address.port))
        with pytest.raises(TransportError, match=str(half.address.port)) as raised:
            make("kv_consumer", Settings(inspect=True)).introduce(hellos)
        assert "`inspect` is on" in str(raised.value)
    finally:
        half.close()


def test_a_consumer_that_listens_is_no_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    half = make("kv_consumer", Settings(inspect=True))
    half.introduce({(0, 0): WorkerHello(codec.encode(HELLO), Address("127.0.0.1", 4711))})
    try:
        with pytest.raises(RemoteProtocolError, match="kv_consumer"):
            asyncio.run(meet(half.address, "asker", 10.0))
        with pytest.raises(RemoteProtocolError, match="kv_consumer"):
            asyncio.run(release(half.address, TransferId("t"), 10.0))
        schedule(half, FakeRequest(PREFILL))
        assert step(half) == ()
    finally:
        half.close()


def test_coordinates_after_a_wake_up_are_served_anew() -> None:
    half: SchedulerHalf = make()
    first = half._reception.side_channel._reply()
    output: Any = SimpleNamespace(
        finished_recving=None,
        failed_recving=set(),
        kv_connector_worker_meta=NewHellos({Rank(0, 0): codec.encode(HELLO)}),
    )
    half.reported(output)
    second = half._reception.side_channel._reply()
    assert second.ranks == (HELLO,)
    assert first.incarnation != second.incarnation
