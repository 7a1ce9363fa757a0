"""Pairs whose sides differ: in ranks, block sizes, prefix caching, chunks, speculation, dtype.

One table, one pair of engines per line: each line covers several things at once, since starting a
pair is what costs time. What is right: see `pairs`.
"""

from collections.abc import Iterator

import pytest

from kvflow.demo.requests import Dispatch

from .metrics import metric
from .pairs import RunningPair, Setup, Side, check_fresh_prompts, check_shared_heads, running

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(420)]

SETUPS = (
    Setup(
        name="ranks 2 to 1, blocks 64 to 32, chunks of 512",
        producer=Side(ranks=2, block_tokens=64, chunk_tokens=512),
    ),
    Setup(
        name="ranks 1 to 2, blocks 32 to 64, producer caches prefixes",
        producer=Side(prefix_caching=True),
        consumer=Side(ranks=2, block_tokens=64),
    ),
    Setup(name="ranks 2 to 2", producer=Side(ranks=2), consumer=Side(ranks=2)),
    Setup(
        name="blocks 32 to 96, both cache prefixes, chunks of 512, n-grams",
        producer=Side(prefix_caching=True, chunk_tokens=512),
        consumer=Side(prefix_caching=True, block_tokens=96, ngram=True),
    ),
    Setup(
        # On a processor with AMX its kernels order a block in another way than float32's.
        name="bfloat16, blocks 32 to 64, consumer caches prefixes",
        producer=Side(dtype="bfloat16"),
        consumer=Side(dtype="bfloat16", block_tokens=64, prefix_caching=True),
    ),
)
LENGTHS = (2, 31, 32, 63, 65, 96, 129, 300, 700, 1500)
HEADS = (40, 96, 130, 512)

BOTH_ORDERS = pytest.mark.parametrize("dispatch", list(Dispatch), ids=lambda d: d.value)


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.name)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningPair]:
    with running(request.param, tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@BOTH_ORDERS
def test_tokens_are_those_of_one_engine_alone(pair: RunningPair, dispatch: Dispatch) -> None:
    check_fresh_prompts(pair, LENGTHS, dispatch, together=False)
    if pair.setup.consumer.ngram:
        assert metric(pair.consumer_url, "vllm:spec_decode_num_drafts_total") > 0


@BOTH_ORDERS
def test_requests_at_the_same_time_do_not_mix(pair: RunningPair, dispatch: Dispatch) -> None:
    if pair.setup.consumer.dtype == "bfloat16":
        pytest.skip("in a batch, one engine alone rounds otherwise too: 1 of 12 prompts differs")
    check_fresh_prompts(pair, LENGTHS, dispatch, together=True)


@BOTH_ORDERS
def test_a_prefix_hit_moves_only_what_is_missing(pair: RunningPair, dispatch: Dispatch) -> None:
    check_shared_heads(pair, HEADS, dispatch)
