"""What `kvflow bench serve` is asked to do, checked once.

Whatever is wrong with an option is one `OptionError` that names the option and says what is
allowed; the rest of the benchmark meets only good values.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvflow.demo.engines import Json
from kvflow.errors import KVFlowError

Value = TypeVar("Value")

_RATE_MOST = 10_000.0
_LENGTH_MOST = 10_000_000


class OptionError(KVFlowError):
    """An option has a value that it cannot have."""

    def __init__(self, option: str, problem: str) -> None:
        self.option = option
        self.problem = problem
        super().__init__(f"{option}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Rates in requests/s, lengths in tokens."""

    connectors: tuple[str, ...]
    rates: tuple[float, ...]
    lengths: tuple[int, ...]
    requests: int
    """Per point: one rate, one length, one connector in one dispatch order, one round."""
    output_tokens: int = 16
    repeats: int
    seed: int = 1
    model: str | None = None
    """A Hugging Face name or a directory; None: the tiny model that is made here."""
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int | None = None
    """None: 512 on a CPU, vLLM's own choice elsewhere."""
    sequential_too: bool = False
    """Measure kvflow's two pushes with sequential dispatch as well."""
    even_peers: bool | None = None
    """None: on a CPU only."""
    producer_devices: tuple[str, ...] | None = None
    consumer_devices: tuple[str, ...] | None = None
    engine_arguments: tuple[str, ...] = ()
    json_path: Path | None = None
    png_path: Path | None = None
    out: Path | None = None

    def json(self) -> dict[str, Json]:
        """As they are kept with the results."""
        fields = dataclasses.asdict(self)
        return {key: str(v) if isinstance(v, Path) else v for key, v in fields.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured where nothing is said."""

    rates: tuple[float, ...]
    lengths: tuple[int, ...]
    requests: int
    repeats: int


FULL = Extent(rates=(1.0, 2.0, 3.0), lengths=(512, 1024, 2048), requests=24, repeats=3)
QUICK = Extent(rates=(1.0, 2.0), lengths=(512, 2048), requests=12, repeats=1)


def rates(text: str) -> tuple[float, ...]:
    """Requests per second from "1,2.5". Raises `OptionError`."""
    return _several(
        "--rates", text, float, lambda rate: 0 < rate <= _RATE_MOST, "requests/s above 0"
    )


def lengths(text: str) -> tuple[int, ...]:
    """Prompt lengths in tokens from "512,2048". Raises `OptionError`."""
    return _several(
        "--lengths", text, int, lambda length: 1 <= length <= _LENGTH_MOST, "tokens, at least 1"
    )


def connectors(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names out of `known` from "a,b". Raises `OptionError`."""
    return _several("--connectors", text, str, lambda name: name in known, ", ".join(known))


def devices(option: str, text: str | None) -> tuple[str, ...] | None:
    """Device numbers from "0-3,6". Raises `OptionError`."""
    if text is None:
        return None
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise OptionError(option, f"{part!r} is no device number or range, such as 0-7")
        ends = (int(first), int(last or first))
        if ends[0] > ends[1]:
            raise OptionError(option, f"the range {part!r} goes backwards")
        found += [str(number) for number in range(ends[0], ends[1] + 1)]
    return tuple(found)


def check(options: ServeOptions) -> None:
    """What no single option shows. Raises `OptionError`."""
    sides = {
        "--producer-devices": options.producer_devices,
        "--consumer-devices": options.consumer_devices,
    }
    for option, given in sides.items():
        if given is not None and len(given) < options.tensor_parallel_size:
            raise OptionError(
                option,
                f"{len(given)} devices, and --tensor-parallel-size is "
                f"{options.tensor_parallel_size}",
            )
    shared = set(options.producer_devices or ()) & set(options.consumer_devices or ())
    if shared:
        raise OptionError(
            "--consumer-devices", f"the producer has {', '.join(sorted(shared))} as well"
        )
    if options.png_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--png", "needs matplotlib: pip install 'kvflow[bench]'")


def _several(
    option: str,
    text: str,
    read: Callable[[str], Value],
    is_good: Callable[[Value], bool],
    allowed: str,
) -> tuple[Value, ...]:
    values: list[Value] = []
    for part in text.split(","):
        try:
            value = read(part.strip())
        except ValueError:
            raise OptionError(option, f"{part!r} is not one of: {allowed}") from None
        if not is_good(value):
            raise OptionError(option, f"{part!r} is not one of: {allowed}")
        values.append(value)
    return tuple(dict.fromkeys(values))
