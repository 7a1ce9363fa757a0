"""What the loop thread costs, and how soon it sees a notification. Prints; asserts nothing.

    python tests/bench/loop_cost.py [--seconds 5] [--notices 500]

One engine with a real NIXL agent in this process, without vLLM; another process sends it notices at
random moments, each with the time at which it was sent (Linux's monotonic clock is one for all
processes). A notice counts as seen when `port.receive` has returned it to the driver. CPU time is
that of the loop thread alone, as the kernel's scheduler counts it.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "nixl"))

from loop_process import Engine  # noqa: E402

from kvflow.core.notices import Alive  # noqa: E402
from kvflow.core.timings import Timings  # noqa: E402
from kvflow.errors import TransportError  # noqa: E402
from kvflow.ids import AgentName, new_incarnation  # noqa: E402
from kvflow.io.coordinates import Identity  # noqa: E402
from kvflow.io.nixl_port import NixlPort  # noqa: E402
from kvflow.settings import Settings  # noqa: E402
from kvflow.wire import codec  # noqa: E402

SENDER = "sender/"
GAP_S = 0.003
"""Mean time between two notices."""
PATIENT = Settings(timings=Timings(load_deadline_s=600.0, meet_deadline_s=600.0))


class TimedPort(NixlPort):
    """Notes when each notice was given to the driver. `seen` holds (sent, seen) in seconds."""

    seen: list[tuple[float, float]]

    def receive(self) -> list[tuple[AgentName, bytes]]:
        arrived = super().receive()
        if arrived:
            now = time.monotonic()
            for sent_by, payload in arrived:
                if not sent_by.startswith(SENDER):
                    continue
                for notice in codec.decode_frame(payload)[0]:
                    if isinstance(notice, Alive):
                        self.seen.append((notice.clock_s, now))
        return arrived


class TimedEngine(Engine):
    """An engine whose port is timed."""

    def _make_port(self, identity: Identity) -> NixlPort:
        self.port = TimedPort(AgentName(f"{self.name}/{identity.incarnation}"))
        self.port.seen = []
        return self.port

    @property
    def seen(self) -> list[tuple[float, float]]:
        assert isinstance(self.port, TimedPort)
        return self.port.seen


def sender(metadata: str, notices: int) -> None:
    """The other process: sends, and tells on standard error what could not be sent."""
    port = NixlPort(AgentName(f"{SENDER}{new_incarnation()}"))
    name = port.add_peer(bytes.fromhex(metadata))
    rng = random.Random(1)
    for number in range(notices + 20):
        # The first twenty make the connection; their time does not count.
        clock_s = time.monotonic() if number >= 20 else 0.0
        try:
            port.send(name, codec.encode_frame([Alive(standings=(), clock_s=clock_s)], None))
        except TransportError as error:
            print(error, file=sys.stderr)
        until = time.monotonic() + rng.uniform(0, 2 * GAP_S)
        while (rest := until - time.monotonic()) > 0:
            port.receive()
            time.sleep(min(rest, 0.0005))
    port.close()


def cpu_s(native_id: int) -> float:
    """Time on a processor so far, of one thread of this process."""
    stat = Path(f"/proc/self/task/{native_id}/schedstat").read_text()
    return int(stat.split()[0]) / 1e9


def share(engine: Engine, seconds: float) -> float:
    """The loop thread's share of one core, in percent."""
    native_id = engine.loop.native_id
    assert native_id is not None
    before, start = cpu_s(native_id), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_s(native_id) - before) / (time.monotonic() - start)


def latencies_us(engine: TimedEngine, notices: int) -> list[float]:
    """From the sending of a notice to its being seen, in microseconds, sorted."""
    assert engine.port is not None
    engine.seen.clear()
    command = [sys.executable, __file__, "--sender", engine.port.metadata().hex()]
    subprocess.run([*command, "--notices", str(notices)], check=True, stdout=subprocess.DEVNULL)
    time.sleep(0.1)
    return sorted(1e6 * (seen - sent) for sent, seen in engine.seen if sent)


def measure(engine: TimedEngine, state: str, seconds: float, notices: int) -> None:
    cost = share(engine, seconds)
    times = latencies_us(engine, notices)
    p99 = times[int(0.99 * (len(times) - 1))]
    print(
        f"{state:<10} cpu {cost:5.2f} % of a core   "
        f"notice seen after {statistics.median(times):6.0f} us median, {p99:6.0f} us p99, "
        f"{times[-1]:6.0f} us at most ({len(times)} of {notices})"
    )


def until(holds: Callable[[], object]) -> None:
    while not holds():
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each CPU measurement")
    parser.add_argument("--notices", type=int, default=500)
    parser.add_argument("--sender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sender:
        sender(options.sender, options.notices)
        return
    settings = PATIENT
    polls = {name: getattr(settings, f"poll_{name}_us") for name in ("quick", "expectant", "idle")}
    print(f"polls each (us): {json.dumps(polls)}")
    with TimedEngine("measured", 1, settings) as engine, Engine("producer", 2, settings) as peer:
        measure(engine, "idle", options.seconds, options.notices)
        engine.start_prefill("expected")
        measure(engine, "expectant", options.seconds, options.notices)
        engine.load("awaited", peer.address, [1])
        driver = engine.loop._driver
        assert driver is not None
        until(lambda: driver.engine.records.population["consumer", "registered"])
        measure(engine, "awaiting", options.seconds, options.notices)


if __name__ == "__main__":
    main()
