"""Which engine is chosen."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvflow.router.policies import LeastLoaded, PrefixAffinity, RoundRobin


@dataclass(kw_only=True)
class Here:
    """An engine as a policy sees it."""

    url: str
    in_flight: int = 0
    tokens: int = 0
    kv_usage: float = 0.0


def engines(count: int) -> list[Here]:
    return [Here(url=f"http://e{number}") for number in range(count)]


def heads(count: int) -> list[bytes]:
    return [f"prompt {number}".encode() for number in range(count)]


def test_round_robin_goes_round() -> None:
    policy, three = RoundRobin(), engines(3)
    assert [policy.choose(three, b"").url[-1] for _ in range(6)] == list("012012")


def test_the_least_loaded_has_the_fewest_tokens_in_flight() -> None:
    few, many = Here(url="few", tokens=10, kv_usage=0.9), Here(url="many", tokens=20)
    assert LeastLoaded().choose([many, few], b"") is few


def test_of_equally_loaded_engines_the_emptier_one_is_taken_and_equal_ones_in_turns() -> None:
    policy = LeastLoaded()
    full, empty = Here(url="full", kv_usage=0.8), Here(url="empty", kv_usage=0.1)
    assert {policy.choose([full, empty], b"").url for _ in range(4)} == {"empty"}
    two = engines(2)
    assert Counter(policy.choose(two, b"").url for _ in range(10)) == {e.url: 5 for e in two}


def test_prompts_that_begin_alike_meet_at_one_engine_and_others_are_spread() -> None:
    policy, four = PrefixAffinity(), engines(4)
    assert len({policy.choose(four, b"the same").url for _ in range(5)}) == 1
    assert len({policy.choose(four, head).url for head in heads(100)}) == 4


@given(gone=st.integers(0, 3))
def test_an_engine_that_goes_moves_only_its_own_prompts(gone: int) -> None:
    policy, four = PrefixAffinity(), engines(4)
    left = [each for each in four if each is not four[gone]]
    for head in heads(50):
        before, after = policy.choose(four, head), policy.choose(left, head)
        assert before is four[gone] or after is before


def test_affinity_gives_way_when_its_engine_has_far_more_to_do() -> None:
    policy, two = PrefixAffinity(spread_tokens=100), engines(2)
    usual = policy.choose(two, b"the same")
    usual.tokens = 101
    assert policy.choose(two, b"the same") is not usual
    usual.tokens = 100
    assert policy.choose(two, b"the same") is usual
