"""Pairs whose sides differ, and kinds of cache group, where the consumer reads the KV.

The like of `test_layouts` and `test_families`, as far as reading differs: who plans, in whose
blocks, and from which state of a prompt.
"""

from collections.abc import Iterator

import pytest

from kvflow.demo.requests import Dispatch
from kvflow.demo.traces import read_journeys

from .pairs import RunningPair, Setup, Side, check_fresh_prompts, check_shared_heads, running

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(420)]

SETUPS = (
    Setup(
        name="ranks 2 to 1, blocks 64 to 32, consumer caches prefixes",
        producer=Side(ranks=2, block_tokens=64),
        consumer=Side(prefix_caching=True),
        mode="pull",
    ),
    Setup(
        name="gemma3, blocks 32 to 64, producer caches prefixes, chunks of 512",
        family="gemma3",
        producer=Side(prefix_caching=True, chunk_tokens=512),
        consumer=Side(block_tokens=64),
        mode="pull",
    ),
    Setup(
        # vLLM makes the producer's blocks 160 tokens long, so that a page can hold a state.
        name="granite_moe_hybrid, blocks 160 to 320",
        family="granite_moe_hybrid",
        consumer=Side(block_tokens=320),
        computed=1,
        mode="pull",
    ),
)
LENGTHS = (2, 31, 64, 127, 129, 161, 321, 700, 1500)
HEADS = (100, 700)

BOTH_ORDERS = pytest.mark.parametrize("dispatch", list(Dispatch), ids=lambda d: d.value)


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.name)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningPair]:
    with running(request.param, tmp_path_factory.mktemp("pull")) as pair:
        yield pair


@BOTH_ORDERS
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_tokens_are_those_of_one_engine_alone_s6(
    pair: RunningPair, dispatch: Dispatch, together: bool
) -> None:
    check_fresh_prompts(pair, LENGTHS, dispatch, together=together)


@BOTH_ORDERS
def test_a_prefix_hit_moves_only_what_is_missing(pair: RunningPair, dispatch: Dispatch) -> None:
    check_shared_heads(pair, HEADS, dispatch)


def test_nothing_was_written(pair: RunningPair) -> None:
    """What the tests before have moved; what was read of a prefill is confirmed at once."""
    journeys = read_journeys(pair.directory)
    assert any(each.reached("producer", "lent") for each in journeys.values())
    for each in journeys.values():
        assert not each.reached("producer", "transferring")
        assert not each.reached("producer", "streaming")
        assert each.failures() == []
