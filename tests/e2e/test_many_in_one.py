"""Several answers (`n`) and several prompts in one request: right, or refused; never wrong.

vLLM makes one request of its own for each answer to each prompt, and gives all of them the same
`kv_transfer_params`. With a transfer id in these, several loads claim one transfer, and none gets
it (`ambiguous`). Without, each transfer is named after vLLM's request id, which counts answers and
prompts in the same way on both sides: as many legs meet, each its own.

vLLM refuses `n > 1` with greedy sampling; `top_k = 1` takes the same tokens.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvflow.demo.engines import SERVED_MODEL, EnginePair, Json
from kvflow.demo.requests import (
    OUTPUT_TOKENS,
    Client,
    Dispatch,
    Endpoints,
    Naming,
    decode_params,
    prefill_params,
)
from kvflow.demo.traces import TRACE_SUFFIX

from .metrics import usage_after
from .pairs import Prompt, fresh_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(180)]

LEASE_S = 30.0
"""The default. Blocks of a prefill that nobody may claim are kept for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    prompts: int
    n: int
    prefill_n: int
    """Some routers set `n = 1` in the prefill leg."""
    dispatch: Dispatch
    has_transfer_id: bool
    is_served: bool

    @property
    def name(self) -> str:
        named = "transfer id" if self.has_transfer_id else "request id"
        return (
            f"{self.prompts} prompts, n={self.n} and {self.prefill_n}, {named},"
            f" {self.dispatch.value}"
        )


CASES = tuple(
    Case(
        prompts=prompts,
        n=n,
        prefill_n=prefill_n,
        dispatch=dispatch,
        has_transfer_id=has_transfer_id,
        # The answer to a prefill leg tells one transfer's id, whatever the number of prefills.
        is_served=not has_transfer_id and dispatch is Dispatch.CONCURRENT,
    )
    for prompts, n, prefill_n in ((1, 2, 2), (1, 2, 1), (2, 1, 1), (2, 2, 2))
    for dispatch in Dispatch
    for has_transfer_id in (True, False)
    # Two loads after one prefill's request id: no id of theirs ever exists, and the lease decides.
    if not (n > prefill_n and dispatch is Dispatch.CONCURRENT and not has_transfer_id)
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_answer_is_right_or_the_request_is_refused(
    endpoints: Endpoints, trace_directory: Path, case: Case
) -> None:
    prompts = fresh_prompts([200] * case.prompts, case.name)
    naming = Naming.by_transfer_id() if case.has_transfer_id else Naming.by_request_id()
    status, answers, expected = asyncio.run(send(endpoints, case, prompts, naming))
    if case.is_served:
        assert status == 200
        assert answers == expected
    else:
        assert status == 500
        assert reasons(trace_directory, naming) & {"ambiguous", "forgotten"}


def test_afterwards_nothing_is_left_in_either_pool(
    engine_pair: EnginePair, endpoints: Endpoints
) -> None:
    for url in (endpoints.producer_url, endpoints.consumer_url):
        assert usage_after(url, LEASE_S + 10.0) == 0, url
    assert all(engine.is_running() for engine in engine_pair.engines)


async def send(
    endpoints: Endpoints, case: Case, prompts: list[Prompt], naming: Naming
) -> tuple[int, list[list[int]], list[list[int]]]:
    """The decode leg's status and answers, and what the producer alone makes of the prompts."""
    prefill = {
        "n": case.prefill_n,
        "max_tokens": 1,
        "kv_transfer_params": prefill_params(naming),
    }
    params = decode_params(endpoints, naming)
    if case.dispatch is Dispatch.CONCURRENT:
        decode = {"n": case.n, "max_tokens": OUTPUT_TOKENS, "kv_transfer_params": params}
        (kept, _, _), (status, answers, _) = await asyncio.gather(
            complete(endpoints.producer_url, prompts, naming, prefill),
            complete(endpoints.consumer_url, prompts, naming, decode),
        )
    else:
        kept, _, passed_on = await complete(endpoints.producer_url, prompts, naming, prefill)
        params = {**params, **passed_on}
        decode = {"n": case.n, "max_tokens": OUTPUT_TOKENS, "kv_transfer_params": params}
        status, answers, _ = await complete(endpoints.consumer_url, prompts, naming, decode)
    assert kept == 200
    async with Client(endpoints) as client:
        alone = [await client.monolithic(prompt) for prompt in prompts]
    return status, answers, [list(one.token_ids) for one in alone for _ in range(case.n)]


async def complete(
    url: str, prompts: list[Prompt], naming: Naming, body: Mapping[str, Json]
) -> tuple[int, list[list[int]], dict[str, Any]]:
    """Status, token ids of every choice, `kv_transfer_params` of one HTTP request."""
    whole = {
        "model": SERVED_MODEL,
        "prompt": [list(prompt) for prompt in prompts],
        "temperature": 1.0,
        "top_k": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        **body,
    }
    headers = {} if naming.request_id is None else {"X-Request-Id": naming.request_id}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=whole, headers=headers) as response,
    ):
        answer = await response.json()
    choices = [choice["token_ids"] for choice in answer.get("choices", ())]
    return response.status, choices, answer.get("kv_transfer_params") or {}


def reasons(directory: Path, naming: Naming) -> set[str]:
    """Why transfers of this name failed, in either engine."""
    lines = [
        json.loads(line)
        for path in directory.glob(f"*{TRACE_SUFFIX}")
        for line in path.read_text(encoding="utf-8").splitlines()
        if str(naming.transfer_id or naming.request_id) in line
    ]
    return {line["reason"] for line in lines if line["to"] == "failed" and "reason" in line}
