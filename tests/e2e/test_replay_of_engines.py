"""What real engines did is what the tables allow: their traces, followed row by row."""

import asyncio
from pathlib import Path

import pytest

from kvflow.demo.engines import EnginePair
from kvflow.demo.requests import Client, Dispatch, Endpoints, prompts
from kvflow.demo.traces import TRACE_SUFFIX
from kvflow.testing.replay import replay

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(120)]


def test_every_line_of_the_shared_engines_traces_is_a_row(
    engine_pair: EnginePair, endpoints: Endpoints, trace_directory: Path
) -> None:
    """Whatever other tests did with this pair is in its traces too."""

    async def one_each() -> None:
        async with Client(endpoints) as client:
            for dispatch in Dispatch:
                exchange = await client.disaggregated(prompts(1)[0], dispatch=dispatch)
                assert exchange.error is None

    asyncio.run(one_each())
    report = replay(sorted(trace_directory.glob(f"*{TRACE_SUFFIX}")))
    assert report.first is None, report.first
    assert report.matched >= 2
    assert report.unmatched == 0
