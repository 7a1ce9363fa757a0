"""`kv_transfer_params`: which transfer they name, and what is said of a bad one.

The module needs neither vLLM nor torch, but its package does.
"""

from typing import Any

import pytest

from kvflow.errors import ConfigurationError

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from kvflow.connector import params as p
from kvflow.ids import Address

HERE = {"do_remote_prefill": True, "remote_host": "prefill", "remote_port": 5600}
ROUTERS_ID = "cmpl-3f2a-0"
SUFFIX = "-1a2b3c4d"
"""What vLLM appends to a client's id (`assign_request_id`)."""


def remote(**params: object) -> p.Remote:
    return p.remote({**HERE, **params}, ROUTERS_ID + SUFFIX, randomized=True)


# -- the transfer id -----------------------------------------------------------------------------


def test_a_transfer_id_is_taken_as_it_is() -> None:
    assert remote(transfer_id="t!~").transfer_id == "t!~"
    assert remote(transfer_id="t", remote_request_id="other").transfer_id == "t"
    given = {"transfer_id": "x" * 256}
    assert p.prefill_transfer_id(given, "request", randomized=True) == "x" * 256


def test_without_a_transfer_id_the_remote_request_id_counts() -> None:
    assert remote(remote_request_id="prefill-7").transfer_id == "prefill-7"
    assert remote(transfer_id=None, remote_request_id="prefill-7").transfer_id == "prefill-7"


@pytest.mark.parametrize(
    ("request_id", "randomized"), [(ROUTERS_ID + SUFFIX, True), (ROUTERS_ID, False)]
)
def test_without_either_the_clients_request_id_counts_on_both_legs(
    request_id: str, randomized: bool
) -> None:
    assert p.remote(HERE, request_id, randomized=randomized).transfer_id == ROUTERS_ID
    prefill = p.prefill_transfer_id({}, request_id, randomized=randomized)
    assert prefill == ROUTERS_ID


def test_ids_that_end_like_vllms_suffix_do_not_collapse() -> None:
    """A router's ids may themselves end in eight hexadecimal digits."""
    ids = ["job-00000000", "job-00000001", "job-deadbeef"]
    legs = {p.remote(HERE, f"{each}-0badcafe", randomized=True).transfer_id for each in ids}
    assert legs == set(ids)
    plain = {p.remote(HERE, each, randomized=False).transfer_id for each in ids}
    assert plain == set(ids)


def test_both_legs_of_one_dispatch_name_the_same_transfer_whatever_vllm_appended() -> None:
    prefill = p.prefill_transfer_id({}, f"{ROUTERS_ID}-11111111", randomized=True)
    decode = p.remote(HERE, f"{ROUTERS_ID}-22222222", randomized=True).transfer_id
    assert prefill == decode


def test_a_producers_answer_names_the_transfer_for_a_router_that_knows_upstreams_keys() -> None:
    answer = {"transfer_id": "t", "remote_request_id": "t", "remote_block_ids": [[1]], **HERE}
    del answer["transfer_id"]
    assert p.remote(answer, "something-else-12345678", randomized=True).transfer_id == "t"


@pytest.mark.parametrize("made", ["chatcmpl-{}", "cmpl-{}-0"])
def test_a_router_that_says_its_own_header_means_what_both_legs_share(made: str) -> None:
    """vllm-router 0.1.17, when a producer has told it once that it pushes."""
    header = "___prefill_addr_a:1___decode_addr_b:2_0123"
    prefill = p.prefill_transfer_id({}, f"{made.format(header)}-11111111", randomized=True)
    told = {**HERE, "remote_request_id": header}
    decode = p.remote(told, f"{made.format(header)}-22222222", randomized=True)
    assert decode.transfer_id == prefill == made.format(header)
    other = {**HERE, "remote_request_id": f"{header}-0"}
    unlike = p.remote(other, f"{made.format(header)}-22222222", randomized=True)
    assert unlike.transfer_id == f"{header}-0"


def test_the_address_and_the_engine_id_are_taken_over() -> None:
    assert remote(remote_engine_id="e").engine_id == "e"
    assert remote().engine_id is None
    assert remote().address == Address("prefill", 5600)
    for port in (1, 65535):
        assert remote(remote_port=port).address.port == port


def test_keys_of_upstream_that_are_not_needed_may_hold_anything() -> None:
    remote(remote_block_ids="x", tp_size=None, pp_size=-1, remote_num_tokens=[], new_key={})


# -- bad keys ------------------------------------------------------------------------------------

PRINTABLE = "1 to 256 printable ASCII characters without spaces"
BAD: dict[str, tuple[list[Any], str]] = {
    "transfer_id": (["", "a b", "ä", "x" * 257, "t\n", 7, b"t", ["t"], False], PRINTABLE),
    "remote_request_id": (["", "a b", "x" * 257, 7], PRINTABLE),
    "remote_host": ([None, "", 7, "h" * 256, ["h"]], "host name or address"),
    "remote_port": ([None, 0, -1, 65536, "5600", 5600.0, True, [1]], "integer 1..65535"),
    "remote_engine_id": ([7, b"e", ["e"], {}], "a string, or absent"),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, (values, _) in BAD.items() for value in values]
)
def test_a_bad_value_is_named_with_its_key_and_what_is_allowed(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        remote(**{key: value})
    assert raised.value.key == f"kv_transfer_params.{key}"
    assert raised.value.value == value
    for said in (f"kv_transfer_params.{key}={value!r}", BAD[key][1]):
        assert said in str(raised.value)


@pytest.mark.parametrize("key", ["remote_host", "remote_port"])
def test_a_missing_address_is_named(key: str) -> None:
    params = {name: value for name, value in HERE.items() if name != key}
    with pytest.raises(ConfigurationError, match=key):
        p.remote(params, ROUTERS_ID + SUFFIX, randomized=True)


@pytest.mark.parametrize("request_id", ["short", "-12345678", "with space-12345678"])
def test_a_request_id_that_can_be_no_transfer_id_is_named_as_such(request_id: str) -> None:
    with pytest.raises(ConfigurationError, match="X-Request-Id"):
        p.remote(HERE, request_id, randomized=True)
    with pytest.raises(ConfigurationError, match="transfer_id"):
        p.prefill_transfer_id({}, request_id, randomized=True)


@pytest.mark.parametrize("params", [None, [], "do_remote_prefill", 1, {}, {"do_remote_decode": 0}])
def test_what_is_no_leg_is_neither(params: object) -> None:
    assert not p.wants_remote_prefill(params)
    assert not p.wants_remote_decode(params)


def test_legs_are_told_apart() -> None:
    assert p.wants_remote_prefill(HERE)
    assert not p.wants_remote_decode(HERE)
    assert p.wants_remote_decode({"do_remote_decode": True, "do_remote_prefill": False})
