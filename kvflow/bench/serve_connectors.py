"""The connectors that are measured, and what the two legs of a request say to each.

kvflow's legs share a transfer id. Those of vLLM's own NIXL connectors are what vLLM's proxies send:
the prefill leg asks for remote decode, and the decode leg carries the `kv_transfer_params` of its
answer. With concurrent dispatch there is no answer yet; the decode leg then carries who the
producer is (read once, from the answer to the first warm-up request), and vLLM finds the transfer
by the `X-Request-Id` that both legs have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvflow import settings
from kvflow.demo.engines import Json, kvflow_connector
from kvflow.demo.requests import (
    Dispatch,
    Endpoints,
    JsonObject,
    Naming,
    decode_params,
    prefill_params,
)
from kvflow.errors import ConfigurationError
from kvflow.ids import TransferId

_BOTH = (Dispatch.SEQUENTIAL, Dispatch.CONCURRENT)
_PRODUCER_KEYS = (
    *("remote_engine_id", "remote_host", "remote_port"),
    *("tp_size", "pp_size", "dcp_size"),
)
_NOBODY_KEYS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
"""What vLLM's proxies send as null with a prefill leg."""


class Origin(StrEnum):
    """Whose connector it is."""

    KVFLOW = "kvflow"
    UPSTREAM = "upstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """One way to move KV, with the settings of both engines."""

    key: str
    """What `--connectors` calls it."""
    name: str
    origin: Origin
    class_name: str
    extra_config: Mapping[str, Json] = field(default_factory=dict)
    dispatches: tuple[Dispatch, ...]

    def transfer_config(self, role: str) -> dict[str, Json]:
        """`--kv-transfer-config`; a load that fails is an error, and not computed quietly."""
        if self.origin is Origin.KVFLOW:
            config = kvflow_connector(role)
        else:
            config = {
                "kv_connector": self.class_name,
                "kv_role": role,
                "kv_load_failure_policy": "fail",
            }
        return {**config, "kv_connector_extra_config": dict(self.extra_config)}


STREAMED = Connector(
    key="kvflow-streamed",
    name="kvflow streamed",
    origin=Origin.KVFLOW,
    class_name="KVFlowConnector",
    extra_config={"stream": "on"},
    dispatches=(Dispatch.CONCURRENT,),
)
PUSH = Connector(
    key="kvflow-push",
    name="kvflow push",
    origin=Origin.KVFLOW,
    class_name="KVFlowConnector",
    extra_config={"stream": "off"},
    dispatches=(Dispatch.CONCURRENT,),
)
PULL = Connector(
    key="kvflow-pull",
    name="kvflow pull",
    origin=Origin.KVFLOW,
    class_name="KVFlowConnector",
    extra_config={"mode": "pull"},
    dispatches=(Dispatch.SEQUENTIAL,),
)
UPSTREAM_PUSH = Connector(
    key="upstream-push",
    name="upstream push",
    origin=Origin.UPSTREAM,
    class_name="NixlPushConnector",
    dispatches=_BOTH,
)
UPSTREAM_PULL = Connector(
    key="upstream-pull",
    name="upstream pull",
    origin=Origin.UPSTREAM,
    class_name="NixlConnector",
    dispatches=(Dispatch.SEQUENTIAL,),
)
CONNECTORS = (STREAMED, PUSH, PULL, UPSTREAM_PUSH, UPSTREAM_PULL)
KEYS = tuple(connector.key for connector in CONNECTORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What can be measured of what was asked for."""

    connectors: tuple[Connector, ...]
    left_out: tuple[str, ...]
    """A sentence for each that this version of kvflow does not have."""


def select(keys: Sequence[str], *, sequential_too: bool = False) -> Selection:
    """The connectors of these keys, as far as this version of kvflow knows their settings."""
    connectors: list[Connector] = []
    left_out: list[str] = []
    for connector in (each for each in CONNECTORS if each.key in keys):
        problem = _problem(connector.extra_config) if connector.origin is Origin.KVFLOW else None
        if problem is not None and connector is PUSH and _is_unknown("stream"):
            # Without the setting, push is all that there is: each prompt's KV in one piece.
            connector, problem = replace(connector, extra_config={}), None
        if problem is not None:
            left_out.append(f"{connector.name}: {problem}; left out")
            continue
        if sequential_too and connector.key in (STREAMED.key, PUSH.key):
            connector = replace(connector, dispatches=_BOTH)
        connectors.append(connector)
    return Selection(connectors=tuple(connectors), left_out=tuple(left_out))


def _problem(extra_config: Mapping[str, Json]) -> str | None:
    for key, value in extra_config.items():
        if _is_unknown(key):
            return f"this version has no setting `{key}`"
        try:
            settings.parse({key: value})
        except ConfigurationError as error:
            return f"this version's setting `{key}` is not {value!r} but {error.allowed}"
    return None


def _is_unknown(key: str) -> bool:
    """Whether kvflow refuses the key itself: its answer to a value that no key takes lists keys."""
    try:
        settings.parse({key: None})
    except ConfigurationError as error:
        return error.allowed.startswith("one of the keys ")
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Legs:
    """What the legs of a request carry, for one running pair."""

    connector: Connector
    endpoints: Endpoints
    producer: JsonObject = field(default_factory=dict)
    """Upstream only: what a decode leg must know of the producer before any answer."""

    def knowing(self, answer: JsonObject) -> "Legs":
        """With what the `kv_transfer_params` of a prefill leg's answer say of the producer."""
        if self.connector.origin is Origin.KVFLOW:
            return self
        return replace(self, producer={key: answer[key] for key in _PRODUCER_KEYS if key in answer})

    def request_id(self, name: str) -> str | None:
        """The `X-Request-Id` of both legs."""
        return None if self.connector.origin is Origin.KVFLOW else name

    def prefill(self, name: str) -> dict[str, Json]:
        """`kv_transfer_params` of the prefill leg."""
        if self.connector.origin is Origin.KVFLOW:
            return prefill_params(Naming(transfer_id=TransferId(name)))
        nobody: dict[str, Json] = dict.fromkeys(_NOBODY_KEYS)
        return {"do_remote_decode": True, "do_remote_prefill": False, **nobody}

    def decode(self, name: str, answer: JsonObject | None) -> dict[str, Json]:
        """`kv_transfer_params` of the decode leg; `answer`: those of the prefill leg's, if any."""
        if self.connector.origin is Origin.KVFLOW:
            naming = Naming(transfer_id=TransferId(name))
            known = decode_params(self.endpoints, naming)
            return {**known, **(answer or {}), "transfer_id": name}
        if answer is not None:
            return dict(answer)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": name,
            **self.producer,
        }
