"""One pair of real engines for all end-to-end tests: starting a pair costs 30 to 75 s."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvflow.demo.engines import EnginePair, EngineSettings, kvflow_connector, wait_ready
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import Endpoints
from kvflow.demo.traces import TRACE_SUFFIX

from .trio import FAILS, PRODUCER, RECOMPUTES, Trio
from .ways import CHOSEN, Way


@pytest.fixture(scope="session")
def trace_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared engines write their logs and traces."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def engine_pair(trace_directory: Path) -> Iterator[EnginePair]:
    """A producer and a consumer with kvflow, loaded by module path, with traces on."""
    model = tiny_model()
    producer, consumer = (
        EngineSettings(
            name=name,
            model=model,
            log_path=trace_directory / f"{name}.log",
            kv_transfer_config=kvflow_connector(f"kv_{name}"),
            extra_env={"KVFLOW_TRACE": str(trace_directory / f"{name}-%p{TRACE_SUFFIX}")},
        )
        for name in ("producer", "consumer")
    )
    with EnginePair(producer=producer, consumer=consumer) as pair:
        wait_ready(pair.engines)
        yield pair


@pytest.fixture(scope="session")
def endpoints(engine_pair: EnginePair) -> Endpoints:
    """Where the shared engines are reached."""
    return Endpoints.of(engine_pair.producer, engine_pair.consumer)


@pytest.fixture(scope="module", params=CHOSEN)
def way(request: pytest.FixtureRequest) -> Way:
    """How the engines of a suite that runs in each way move KV."""
    chosen: Way = request.param
    return chosen


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, way: Way) -> Iterator[Trio]:
    """A producer and two consumers that tests may kill."""
    trio = Trio(directory=tmp_path_factory.mktemp(f"trio-{way}"), way=way)
    try:
        asyncio.run(trio.start(*map(trio.settings, (PRODUCER, FAILS, RECOMPUTES))))
        yield trio
    finally:
        trio.stop()
