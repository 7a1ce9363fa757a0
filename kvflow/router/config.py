"""What an operator may set, from a YAML file and from the command line.

An unknown key, a bad value or an unreadable file is a `ConfigurationError`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from kvflow.errors import ConfigurationError

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Mode(StrEnum):
    """When the decode leg is sent."""

    AUTO = "auto"
    """As the consumer's own setting `mode` wants it; decode last while consumers are near full."""
    PUSH = "push"
    """With the prefill leg."""
    PULL = "pull"
    """After the prefill leg's answer."""


class PolicyName(StrEnum):
    """Which of the engines with room is chosen."""

    PREFIX = "prefix"
    LEAST = "least"
    ROBIN = "robin"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router's settings.

    prefill, decode    base URLs of the engines.
    host, port         where the router listens.
    mode               when the decode leg is sent.
    prefill_policy, decode_policy
                       which engine is chosen.
    prefix_chars       how much of a prompt's beginning `prefix` looks at: characters or token ids.
    engine_limit       requests in flight on one engine; more wait here.
    queue_max          requests that may wait here; one more is answered 503.
    queue_timeout_s    one that has waited so long is answered 503.
    dispatches_max     with how many pairs of engines a request is tried before its first token.
    request_timeout_s  a request ends after this, whatever happens.
    full_above         KV usage of a consumer from which it counts as near full (`auto`).
    watch_interval_s   how often an engine is asked how it is; twice no answer in that time, and it
                       is out.
    meet_timeout_s     how long an engine may take to say who it is, at start and when it is back.
    retry_min_s, retry_max_s
                       an engine that is out is tried again after the first, then after twice as
                       long each time, up to the second.
    keepalive_s        a connection to an engine that was idle for so long is not used again. An
                       engine closes it after its own time (vLLM: VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
                       5 s), and a leg sent at that moment would be lost: keep this well below.
    shared_key_file    as in the engines' settings, if they have one.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8000
    mode: Mode = Mode.AUTO
    prefill_policy: PolicyName = PolicyName.PREFIX
    decode_policy: PolicyName = PolicyName.LEAST
    prefix_chars: Count = 1024
    engine_limit: Count = 256
    queue_max: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1024
    queue_timeout_s: Seconds = 30.0
    dispatches_max: Count = 3
    request_timeout_s: Seconds = 600.0
    full_above: Share = 0.9
    watch_interval_s: Seconds = 1.0
    meet_timeout_s: Seconds = 10.0
    retry_min_s: Seconds = 1.0
    retry_max_s: Seconds = 30.0
    keepalive_s: Seconds = 2.0
    shared_key_file: str = ""


def configure(file: Path | None, given: dict[str, Any]) -> Config:
    """The file's settings, and over them those that were `given`. Raises `ConfigurationError`."""
    settings = {**_read(file), **given}
    try:
        config = msgspec.convert(settings, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigurationError("router settings", _shown(file), str(error)) from error
    for key, urls in (("prefill", config.prefill), ("decode", config.decode)):
        if not urls:
            raise ConfigurationError(key, list(urls), "at least one URL of an engine")
        for url in urls:
            _check_url(key, url)
    if both := set(config.prefill) & set(config.decode):
        raise ConfigurationError("decode", sorted(both), "an engine has one role here")
    return config


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    import yaml

    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise ConfigurationError("--config", str(file), f"a YAML file ({what})") from error
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise ConfigurationError("--config", str(file), "a YAML file of keys and values")
    return read


def _shown(file: Path | None) -> str:
    return "command line" if file is None else f"{file} and command line"


def _check_url(key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.path not in ("", "/") or parts.query:
        raise ConfigurationError(key, url, "http://HOST:PORT")
