"""`--kv-transfer-config`, as vLLM and kvflow will read it."""

from collections.abc import Iterator, Mapping

from kvflow.doctor.findings import Finding, breaks, note, ok, warning
from kvflow.errors import ConfigurationError
from kvflow.io import seal
from kvflow.settings import Settings, parse

CONNECTOR = "KVFlowConnector"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
_MODULE = "kvflow.connector"
_POLICIES = ("fail", "recompute")
_KEYS = frozenset(
    {"kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port"}
    | {"kv_connector_extra_config", "kv_connector_module_path", "enable_permute_local_kv"}
    | {"kv_load_failure_policy"}
)
"""Of vLLM 0.32 and 0.33."""


def check(config: Mapping[str, object]) -> Iterator[Finding]:
    """Keys, role, policy, settings, and what goes with what."""
    yield from _keys(config)
    role, policy = config.get("kv_role"), config.get("kv_load_failure_policy", "fail")
    yield _connector(config)
    yield _role(role)
    yield _policy(policy, role)
    extra = config.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        yield breaks(
            f"kv_connector_extra_config is {extra!r}.",
            "vLLM wants an object there, and ends at start.",
            "Make it an object of settings; kvflow settings prints all keys.",
        )
        return
    try:
        settings = parse(extra)
        seal.from_file(settings.shared_key_file)
    except ConfigurationError as error:
        yield breaks(
            f"{error.key} is {error.value!r}.",
            "kvflow refuses it, and the engine ends at start.",
            f"Allowed: {error.allowed}. kvflow settings explains every key.",
        )
        return
    named = ", ".join(f"{key}={value!r}" for key, value in extra.items()) or "all at default"
    yield ok(f"Settings: {named}.", "kvflow takes them; kvflow settings explains every key.")
    yield from _together(settings, role, policy)


def listens(config: Mapping[str, object] | None) -> bool:
    """Whether an engine with it has a side channel; without one, say yes."""
    return config is None or config.get("kv_role") != "kv_consumer"


def backends(config: Mapping[str, object] | None) -> tuple[str, ...]:
    """NIXL's backends by the settings; the default where they are wrong."""
    extra = (config or {}).get("kv_connector_extra_config", {})
    try:
        return parse(extra if isinstance(extra, Mapping) else {}).nixl_backends
    except ConfigurationError:
        return Settings().nixl_backends


def _keys(config: Mapping[str, object]) -> Iterator[Finding]:
    for key in sorted(config.keys() - _KEYS):
        yield breaks(
            f"kv-transfer-config has a key {key!r}.",
            "vLLM knows no such key, and ends at start.",
            "Settings of kvflow belong into kv_connector_extra_config; vLLM's keys are "
            f"{', '.join(sorted(_KEYS))}.",
        )


def _connector(config: Mapping[str, object]) -> Finding:
    name, path = config.get("kv_connector"), config.get("kv_connector_module_path")
    found = f"kv_connector is {name!r}, kv_connector_module_path {path!r}."
    if name != CONNECTOR or path not in (None, _MODULE):
        return breaks(
            found,
            "This engine does not load kvflow.",
            f'"kv_connector": "{CONNECTOR}", and no kv_connector_module_path, or "{_MODULE}".',
        )
    return ok(
        found,
        "By name alone vLLM finds it where kvflow is installed (an entry point); by module path "
        "also where it only is on the path.",
    )


def _role(role: object) -> Finding:
    if role not in ROLES:
        return breaks(
            f"kv_role is {role!r}.",
            "vLLM ends at start without one that it knows.",
            f'"kv_role": one of {", ".join(ROLES)}.',
        )
    means = {
        "kv_producer": "it keeps KV for others and listens; it loads nothing.",
        "kv_consumer": "it loads KV and does not listen.",
        "kv_both": "it keeps KV and loads it, and listens.",
    }
    return ok(f"kv_role is {role}.", f"So {means[str(role)]}")


def _policy(policy: object, role: object) -> Finding:
    found = f"kv_load_failure_policy is {policy!r}."
    if policy not in _POLICIES:
        return breaks(
            found, "vLLM ends at start.", f'"kv_load_failure_policy": {" or ".join(_POLICIES)}.'
        )
    if policy == "recompute":
        return ok(found, "A request whose KV does not come is computed on this engine.")
    if role == "kv_producer":
        return ok(found, "A producer loads nothing.")
    return note(
        found,
        "A request whose KV does not come (a producer that dies, say) ends with an error that the "
        "client sees. It is vLLM's default.",
        '"kv_load_failure_policy": "recompute" computes such a request here instead.',
    )


def _together(settings: Settings, role: object, policy: object) -> Iterator[Finding]:
    if settings.after_preemption == "register" and policy != "recompute":
        yield breaks(
            f"after_preemption is 'register', and kv_load_failure_policy is {policy!r}.",
            "kvflow refuses the two together: a preempted request whose KV the producer does not "
            "keep any more would fail, though it can be computed here.",
            '"kv_load_failure_policy": "recompute".',
        )
    if settings.after_preemption == "register" and role != "kv_producer":
        yield note(
            "after_preemption is 'register'.",
            "It helps only while the producer keeps what it has sent, which it does not by "
            "default.",
            'Set "keep_sent_s" above 0 at the producers, as long as a preemption may last.',
        )
    if role == "kv_producer":
        for key in ("mode", "recompute_below_tokens", "after_preemption"):
            if getattr(settings, key) != getattr(Settings(), key):
                yield warning(
                    f"{key} is {getattr(settings, key)!r}, and kv_role is kv_producer.",
                    "It is a setting of engines that load KV; a producer loads nothing.",
                    "Set it at the consumers.",
                )
    if role == "kv_consumer" and settings.timings.keep_sent_s > 0:
        yield warning(
            f"keep_sent_s is {settings.timings.keep_sent_s:g}, and kv_role is kv_consumer.",
            "It is a setting of engines that keep KV for others.",
            "Set it at the producers.",
        )
