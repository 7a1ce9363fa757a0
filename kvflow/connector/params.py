"""`kv_transfer_params` of one request: upstream's keys, checked, as values of ours.

Keys that a decode leg may carry: `do_remote_prefill`, `remote_host`, `remote_port`, `transfer_id`,
`remote_engine_id`, `remote_request_id`. A bad value is a `ConfigurationError`, which fails that
request and nothing else. Sizes are upstream's business and are not read: engine id, ranks and sizes
come from the meeting. `remote_block_ids` and `remote_num_tokens` are, where a producer of ours has
answered with `remote_prefill` as well: a load that reads begins with them, and goes by what the
producer says in the end.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvflow.core.notices import Offer
from kvflow.errors import ConfigurationError
from kvflow.ids import TRANSFER_ID_CHARS_MAX, Address, TransferId, is_transfer_id

_RANDOM_SUFFIX_CHARS = 9
"""vLLM appends "-" and eight random characters to the id that a client gave (`assign_request_id`),
unless its VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set. Both are known here, so nothing is guessed:
either exactly these nine are dropped, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where a decode leg's KV comes from."""

    transfer_id: TransferId
    address: Address
    engine_id: str | None


def wants_remote_prefill(params: object) -> bool:
    """Whether the request is a decode leg."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


def wants_remote_decode(params: object) -> bool:
    """Whether the request is a prefill leg."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def client_id(request_id: str, *, randomized: bool) -> str:
    """The request id that the client or router gave, from vLLM's own."""
    return request_id[:-_RANDOM_SUFFIX_CHARS] if randomized else request_id


def prefill_transfer_id(
    params: Mapping[str, object], request_id: str, *, randomized: bool
) -> TransferId:
    """The transfer id of a prefill leg: `transfer_id`, else the client's request id."""
    given = params.get("transfer_id")
    if given is None:
        given = client_id(request_id, randomized=randomized)
    return _transfer_id("transfer_id", given)


def remote(params: Mapping[str, object], request_id: str, *, randomized: bool) -> Remote:
    """The parameters of a decode leg.

    The transfer id is `transfer_id`, else `remote_request_id` (a producer of ours puts the
    transfer id there, for routers that know only upstream's keys), else the client's request id.
    A router that dispatches both legs at once does not know yet how the producer names its request,
    and says its own `X-Request-Id`, which both legs have: then the client's request id counts.
    """
    own = client_id(request_id, randomized=randomized)
    key, given = "transfer_id", params.get("transfer_id")
    if given is None:
        key, given = "remote_request_id", params.get("remote_request_id")
    if given is None or (key == "remote_request_id" and _is_header_of(own, given)):
        key, given = "X-Request-Id", own
    engine_id = params.get("remote_engine_id")
    if engine_id is not None and not isinstance(engine_id, str):
        raise _bad("remote_engine_id", engine_id, "a string, or absent")
    return Remote(
        transfer_id=_transfer_id(key, given),
        address=Address(_host(params.get("remote_host")), _port(params.get("remote_port"))),
        engine_id=engine_id,
    )


def offer(params: Mapping[str, object]) -> Offer | None:
    """What a producer's answer told of its finished prefill, block ids of all of vLLM's groups.

    None if it is not all there, or odd: it saves a round trip and is not needed for anything else.
    """
    name = params.get("remote_prefill")
    tokens = params.get("remote_num_tokens")
    blocks = params.get("remote_block_ids")
    if not isinstance(name, str) or not isinstance(blocks, list | tuple):
        return None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        return None
    if not all(map(_are_block_ids, blocks)):
        return None
    return Offer(prefill=name, tokens=tokens, blocks=tuple(map(tuple, blocks)))


def _are_block_ids(given: object) -> bool:
    """A list of counts; of a long prompt there are too many to look at one by one."""
    if not isinstance(given, list | tuple):
        return False
    try:
        ids = np.asarray(given)
    except (ValueError, OverflowError):
        return False
    return not ids.size or (ids.ndim == 1 and ids.dtype.kind == "i" and int(ids.min()) >= 0)


def _is_header_of(own: str, given: object) -> bool:
    """Whether vLLM has made the request id `own` of the header `X-Request-Id: given`."""
    if not isinstance(given, str):
        return False
    return own == f"chatcmpl-{given}" or bool(re.fullmatch(rf"cmpl-{re.escape(given)}-\d+", own))


def _transfer_id(key: str, given: object) -> TransferId:
    if not is_transfer_id(given):
        allowed = f"1 to {TRANSFER_ID_CHARS_MAX} printable ASCII characters without spaces"
        raise _bad(key, given, allowed)
    assert isinstance(given, str)
    return TransferId(given)


def _host(given: object) -> str:
    if not isinstance(given, str) or not given or len(given) > 255:
        raise _bad("remote_host", given, "the producer's side-channel host name or address")
    return given


def _port(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= 65535:
        raise _bad("remote_port", given, "the producer's side-channel port, an integer 1..65535")
    return given


def _bad(key: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"kv_transfer_params.{key}", value, allowed)
