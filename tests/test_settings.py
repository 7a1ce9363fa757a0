"""`kv_connector_extra_config`: every key is taken, every bad one is named."""

import dataclasses
import math

import pytest

from kvflow.core.timings import MAY_BE_ZERO, Timings
from kvflow.errors import ConfigurationError
from kvflow.ids import ATTEMPT_STRIDE
from kvflow.settings import Settings, parse
from kvflow.wire import codec
from kvflow.wire import messages as m

TIMINGS = {field.name: field for field in dataclasses.fields(Timings)}
OWN = {field.name: field for field in dataclasses.fields(Settings) if field.name != "timings"}
WORDS = (
    *("nixl_backends", "shared_key_file", "after_preemption", "cache_layout", "stream", "mode"),
    "inspect",
)
NUMBERS = [*TIMINGS, *(name for name in OWN if name not in WORDS)]
DEFAULTS = Settings()


def value_of(settings: Settings, key: str) -> object:
    return getattr(settings.timings if key in TIMINGS else settings, key)


def is_whole(key: str) -> bool:
    return (TIMINGS | OWN)[key].type in (int, "int")


def test_nothing_set_means_the_defaults() -> None:
    assert parse({}) == DEFAULTS


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_is_taken_and_nothing_else_changes(key: str) -> None:
    default = value_of(DEFAULTS, key)
    assert isinstance(default, int | float)
    # Upwards, except where a longer time would break a promise that Timings keep.
    shorter = key in ("write_lease_s", "slice_max_s", "renew_interval_s", "cancel_deadline_s")
    wanted = default * (0.75 if shorter else 1.25) or 1.5
    wanted = int(wanted) + 1 if is_whole(key) else wanted
    settings = parse({key: wanted})
    assert value_of(settings, key) == wanted
    for other in NUMBERS:
        if other != key:
            assert value_of(settings, other) == value_of(DEFAULTS, other)


def test_a_whole_number_will_do_for_seconds() -> None:
    settings = parse({"lease_s": 60})
    assert settings.timings.lease_s == 60.0
    assert isinstance(settings.timings.lease_s, float)


@pytest.mark.parametrize("given", [["UCX"], ("UCX", "GDS"), ["LIBFABRIC"]])
def test_backends_are_names_in_order(given: list[str]) -> None:
    assert parse({"nixl_backends": given}).nixl_backends == tuple(given)


@pytest.mark.parametrize("given", [[], "UCX", None, [1], {"UCX": 1}, ["UCX", None]])
def test_bad_backends_are_named(given: object) -> None:
    with pytest.raises(ConfigurationError, match="nixl_backends") as raised:
        parse({"nixl_backends": given})
    assert raised.value.allowed == "a list of NIXL backend names"


@pytest.mark.parametrize("given", [True, False])
def test_inspection_is_off_unless_it_is_switched_on(given: bool) -> None:
    assert DEFAULTS.inspect is False
    assert parse({"inspect": given}).inspect is given


@pytest.mark.parametrize("given", [0, 1, "true", "on", None])
def test_what_is_no_switch_is_named(given: object) -> None:
    with pytest.raises(ConfigurationError, match="inspect") as raised:
        parse({"inspect": given})
    assert raised.value.allowed == "true or false"


@pytest.mark.parametrize("given", ["", "key", "/etc/kvflow/key"])
def test_a_key_file_is_a_name(given: str) -> None:
    assert parse({"shared_key_file": given}).shared_key_file == given


@pytest.mark.parametrize("given", [None, 1, True, b"key", ["key"]])
def test_a_bad_name_of_a_key_file_is_named(given: object) -> None:
    with pytest.raises(ConfigurationError, match="shared_key_file") as raised:
        parse({"shared_key_file": given})
    assert raised.value.allowed == "a file name"


@pytest.mark.parametrize("key", ["lease", "LEASE_S", "timings", "", "backends"])
def test_an_unknown_key_is_named_with_all_known_ones(key: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse({key: 1})
    assert raised.value.key == f"kv_connector_extra_config.{key}"
    for known in [*TIMINGS, *OWN]:
        assert known in raised.value.allowed


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize(
    "value", ["1", None, True, [1], math.nan, math.inf, -math.inf, -1, -0.5, 10**400]
)
def test_a_bad_number_is_named_with_what_is_allowed(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse({key: value})
    assert raised.value.key == f"kv_connector_extra_config.{key}"
    assert raised.value.value is value
    assert ("an integer" if is_whole(key) else "a number") in raised.value.allowed


@pytest.mark.parametrize("key", [key for key in NUMBERS if is_whole(key)])
def test_a_fraction_is_no_whole_number(key: str) -> None:
    with pytest.raises(ConfigurationError, match="an integer"):
        parse({key: 1.5})


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("poll_quick_us", 20),
        ("poll_awaiting_us", 20),
        ("poll_expectant_us", 20),
        ("poll_idle_us", 100),
        ("post_bytes_max", 4096),
        ("post_runs_max", 1),
        ("posts_in_flight_max", 1),
        ("side_channel_connections_max", 1),
        ("parked_max", 1),
    ],
)
def test_lower_bounds_are_inclusive(key: str, least: int) -> None:
    assert value_of(parse({key: least}), key) == least
    with pytest.raises(ConfigurationError, match=f"at least {least}"):
        parse({key: least - 1})


@pytest.mark.parametrize("given", ["recompute", "register"])
def test_what_follows_a_preemption_is_one_of_two_words(given: str) -> None:
    assert DEFAULTS.after_preemption == "recompute"
    assert parse({"after_preemption": given}).after_preemption == given


@pytest.mark.parametrize("given", ["", "Register", "fail", True, None, ["register"]])
def test_another_word_for_it_is_named_with_what_is_allowed(given: object) -> None:
    with pytest.raises(ConfigurationError, match="after_preemption") as raised:
        parse({"after_preemption": given})
    assert raised.value.value is given
    assert raised.value.allowed == "recompute or register"


def test_nothing_is_kept_after_a_write_unless_it_is_set() -> None:
    assert parse({"keep_sent_s": 0}).timings.keep_sent_s == 0
    assert parse({"keep_sent_s": 30}).timings.keep_sent_s == 30.0


@pytest.mark.parametrize("key", sorted(TIMINGS.keys() - MAY_BE_ZERO))
def test_durations_are_above_nothing(key: str) -> None:
    with pytest.raises(ConfigurationError, match="above 0"):
        parse({key: 0})


@pytest.mark.parametrize("given", [0, 1, ATTEMPT_STRIDE - 1])
def test_retries_may_be_off_and_are_fewer_than_the_numbers_for_them(given: int) -> None:
    assert parse({"retries_max": given}).timings.retries_max == given


@pytest.mark.parametrize("given", [-1, ATTEMPT_STRIDE])
def test_a_count_of_retries_that_cannot_be_is_named(given: int) -> None:
    with pytest.raises(ConfigurationError, match="retries_max"):
        parse({"retries_max": given})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"fence_s": 1.0}, "write_lease_s + slice_max_s"),
        ({"write_lease_s": 0.3}, "2 * renew_interval_s"),
        ({"lease_s": 0.9}, "write_lease_s"),
        ({"tombstone_s": 2.0}, "2 * fence_s"),
        ({"stop_deadline_s": 1.0}, "cancel_deadline_s"),
        ({"backoff_max_s": 0.1}, "backoff_first_s"),
    ],
)
def test_durations_that_break_a_promise_are_refused(config: dict[str, float], named: str) -> None:
    (key,) = config
    with pytest.raises(ConfigurationError, match=key) as raised:
        parse(config)
    assert named in raised.value.allowed


def test_the_longest_lease_can_still_be_sent() -> None:
    with pytest.raises(ConfigurationError, match="at most 86400"):
        parse({"lease_s": 86_401})
    longest = parse({"lease_s": 86_400}).timings.lease_s
    register = m.Register(
        transfer_id="t",
        attempt=1,
        blocks=(),
        starts=(),
        tokens=0,
        lease_s=longest,
        write_until_s=None,
    )
    codec.decode_frame(codec.encode(m.Frame(notices=(register,))))


def test_every_key_is_documented() -> None:
    for holder, keys in ((Timings, TIMINGS), (Settings, OWN)):
        assert holder.__doc__
        for key in keys:
            assert key in holder.__doc__


@pytest.mark.parametrize("given", ["on", "off"])
def test_streaming_is_on_or_off(given: str) -> None:
    assert DEFAULTS.stream == "on"
    assert parse({"stream": given}).stream == given


@pytest.mark.parametrize("given", ["LBHNC", "BLHNC", ""])
def test_a_cache_layout_is_one_of_vllms_names_or_its_own_choice(given: str) -> None:
    assert DEFAULTS.cache_layout == "LBHNC"
    assert parse({"cache_layout": given}).cache_layout == given


@pytest.mark.parametrize("given", ["HND", "lbhnc", 1, None])
def test_another_cache_layout_is_refused_by_name(given: object) -> None:
    with pytest.raises(ConfigurationError, match="cache_layout"):
        parse({"cache_layout": given})
