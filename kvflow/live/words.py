"""Durations, sizes and names as a terminal shows them."""

from kvflow.wire import live

_MS_PER_S = 1000.0
_S_PER_MIN = 60


def duration(ms: float) -> str:
    """`830 ms`, `2.31 s`, `5 min 12 s`."""
    if ms < _MS_PER_S:
        return f"{ms:.0f} ms"
    seconds = ms / _MS_PER_S
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), _S_PER_MIN)
    return f"{minutes} min {rest:02d} s"


def megabytes(count: int) -> str:
    """In MB of 10^6 bytes; nothing for nothing."""
    return f"{count / 1e6:.1f}" if count else ""


def printable(text: str) -> str:
    """A name from outside must not steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def counts(population: tuple[live.Population, ...]) -> str:
    """`consumer: registered 3, received 12; peer: met 1`."""
    machines: dict[str, list[str]] = {}
    for each in population:
        machines.setdefault(each.machine, []).append(f"{printable(each.state)} {each.count}")
    return "; ".join(f"{machine}: {', '.join(told)}" for machine, told in machines.items())
