"""One producer and two consumers, one for each `kv_load_failure_policy`, to be hit with signals.

An engine that a test killed is started again, on its ports, when a test asks for `Trio.heal`.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvflow.demo.engines import (
    Engine,
    EngineSettings,
    kvflow_connector,
    restart_engine,
    start_engine,
    stop_engines,
    wait_ready_async,
)
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import (
    OUTPUT_TOKENS,
    Client,
    Completion,
    Dispatch,
    Endpoints,
    Exchange,
    Naming,
)
from kvflow.demo.traces import TRACE_SUFFIX
from kvflow.ids import Address, TransferId
from kvflow.io import side_channel

from .metrics import kv_usage
from .ways import Way

PRODUCER, FAILS, RECOMPUTES = "producer", "fails", "recomputes"
LEASE_S = 10.0
"""Instead of the default of 30 s, which would only make tests wait."""
LOSS_S = 5.0
"""A dead producer's loads are reported within this, with default settings."""
SLOW_S = 1.0
"""What vLLM's own steps may add to a bound."""
DRAIN_S = 12.0
"""`--shutdown-timeout`: without it, vLLM kills its engine at once when it gets SIGTERM."""

Prompt = tuple[int, ...]


def note(text: str) -> None:
    """A measured number; shown by `pytest -s`, and when the test fails."""
    print(f"measured: {text}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a trace."""

    at: float
    """Unix time."""
    trigger: str
    dest: str
    reason: str | None
    detail: str | None


class Traces:
    """What the engines' traces say so far, read on demand, each line once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._steps: dict[tuple[str, str], list[Step]] = defaultdict(list)

    def steps(self, engine: str, transfer_id: str) -> list[Step]:
        self._read()
        return self._steps[engine, transfer_id]

    def reached(self, engine: str, transfer_id: str, *states: str) -> bool:
        return any(step.dest in states for step in self.steps(engine, transfer_id))

    def taken(self, engine: str, transfer_id: str, trigger: str, dest: str = "") -> int:
        """How often a trigger (led to a state)."""
        steps = self.steps(engine, transfer_id)
        return sum(step.trigger == trigger and dest in ("", step.dest) for step in steps)

    def last(self, engine: str, transfer_id: str) -> Step | None:
        steps = self.steps(engine, transfer_id)
        return steps[-1] if steps else None

    def failure(self, engine: str, transfer_id: str) -> Step | None:
        """Where the transfer failed, if it did."""
        return next((s for s in self.steps(engine, transfer_id) if s.dest == "failed"), None)

    def count(self, engine: str, transfer_ids: Iterable[str], *states: str) -> int:
        """Transfers that are in one of the states now."""
        last = [self.last(engine, transfer_id) for transfer_id in transfer_ids]
        return sum(step is not None and step.dest in states for step in last)

    def _read(self) -> None:
        for path in self._directory.glob(f"*{TRACE_SUFFIX}"):
            with path.open("rb") as trace:
                trace.seek(self._offsets.get(path, 0))
                finished, newline, _ = trace.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(finished) + len(newline)
            name = path.name.rpartition("-")[0]
            for line in finished.splitlines():
                fields = json.loads(line)
                if fields["machine"] not in ("producer", "consumer"):
                    continue
                self._steps[name, fields["id"]].append(
                    Step(
                        at=fields["t"],
                        trigger=fields["trigger"],
                        dest=fields["to"],
                        reason=fields.get("reason"),
                        detail=fields.get("detail"),
                    )
                )


async def until(condition: Callable[[], bool], *, within_s: float, what: str) -> float:
    """Waits until the condition holds; returns how long that took."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < within_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.002)
    return time.monotonic() - began


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request through the producer and one consumer."""

    consumer: str
    prompt: Prompt
    transfer_id: str
    began: float
    exchange: "asyncio.Task[Exchange]"

    @property
    def decode(self) -> Completion:
        return self.exchange.result().decode

    @property
    def ended(self) -> float:
        """When the decode leg was answered."""
        return self.began + self.decode.total_s


@dataclass(slots=True, kw_only=True)
class Trio:
    """The engines by name, what they should answer, and what their traces say."""

    directory: Path
    way: Way = Way.STREAMED
    engines: dict[str, Engine] = field(default_factory=dict)
    expected: dict[Prompt, tuple[int, ...]] = field(default_factory=dict)
    traces: Traces = field(init=False)
    _starts: int = 0
    _starved: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traces = Traces(self.directory)

    # -- engines -----------------------------------------------------------------------------------

    def settings(
        self, name: str, *extra_args: str, extra: Mapping[str, float | str] | None = None
    ) -> EngineSettings:
        self._starts += 1
        roles = {PRODUCER: "kv_producer", FAILS: "kv_consumer", RECOMPUTES: "kv_consumer"}
        # Small enough that blocks are used again soon: a late write would land in somebody's.
        blocks = () if name == PRODUCER else ("--num-gpu-blocks-override", "800")
        return EngineSettings(
            name=name,
            model=tiny_model(),
            log_path=self.directory / f"{name}.{self._starts}.log",
            kv_transfer_config={
                **kvflow_connector(roles[name]),
                "kv_load_failure_policy": "recompute" if name == RECOMPUTES else "fail",
                "kv_connector_extra_config": {
                    **self.way.extra,
                    "lease_s": LEASE_S,
                    **(extra or {}),
                },
            },
            max_model_tokens=8192,
            extra_env={"KVFLOW_TRACE": str(self.directory / f"{name}-%p{TRACE_SUFFIX}")},
            extra_args=(
                "--max-num-batched-tokens",
                "1024",
                "--shutdown-timeout",
                f"{DRAIN_S:.0f}",
                *blocks,
                *extra_args,
            ),
        )

    async def start(self, *settings: EngineSettings) -> None:
        for each in settings:
            self.engines[each.name] = start_engine(each)
        await wait_ready_async(list(self.engines.values()))

    async def restart(self, *settings: EngineSettings) -> None:
        """Starts ended engines anew, on their ports."""
        began = time.monotonic()
        for each in settings:
            self.engines[each.name] = restart_engine(self.engines[each.name], each)
        await wait_ready_async([self.engines[each.name] for each in settings])
        names = ", ".join(each.name for each in settings)
        note(f"restart of {names}: {time.monotonic() - began:.1f} s")

    async def heal(self) -> None:
        """Starts whatever does not run; an earlier test may have left it so."""
        ended = [name for name, engine in self.engines.items() if not engine.is_running()]
        await self.restart(*map(self.settings, ended))

    def stop(self) -> None:
        for name in self.engines:
            self.signal(name, signal.SIGCONT)  # a paused one would not end
        stop_engines(list(self.engines.values()))

    def signal(self, name: str, number: signal.Signals) -> float:
        """To every process of the engine; returns when."""
        engine = self.engines[name]
        if engine.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.process.pid, number)
        return time.monotonic()

    def living(self) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.is_running()]

    def mark(self) -> float:
        """From now on `slack_s` counts; returns the Unix time."""
        self._starved = {name: starved_s(self.engines[name]) for name in self.living()}
        return time.time()

    def slack_s(self) -> float:
        """What a bound must allow: the longest that a living engine's kvflow thread was ready to
        run since `mark` while others had the processors, and what vLLM's step may take.
        """
        waits = [
            starved_s(self.engines[name]) - self._starved.get(name, 0.0) for name in self.living()
        ]
        return SLOW_S + max(waits, default=0.0)

    # -- requests ----------------------------------------------------------------------------------

    def endpoints(self, consumer: str) -> Endpoints:
        return Endpoints.of(self.engines[PRODUCER], self.engines[consumer])

    def client_of(self, consumer: str) -> Client:
        """A client of the producer and one consumer."""
        return Client(self.endpoints(consumer))

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[dict[str, Client]]:
        """One for each consumer."""
        async with (
            self.client_of(FAILS) as fails,
            self.client_of(RECOMPUTES) as recomputes,
        ):
            yield {FAILS: fails, RECOMPUTES: recomputes}

    async def expect(self, prompts: Sequence[Prompt], tokens: int) -> None:
        """Lets one engine alone say what is right."""
        async with Client(self.endpoints(FAILS)) as client:
            for prompt in prompts:
                url = client.endpoints.producer_url
                alone = await client.complete(url, prompt, tokens=tokens)
                assert alone.error is None
                self.expected[prompt] = alone.token_ids

    def send(
        self,
        client: Client,
        consumer: str,
        prompt: Prompt,
        *,
        dispatch: Dispatch = Dispatch.CONCURRENT,
        naming: Naming | None = None,
    ) -> Sent:
        naming = naming or Naming.by_transfer_id()
        exchange = client.disaggregated(prompt, dispatch=dispatch, naming=naming)
        return Sent(
            consumer=consumer,
            prompt=prompt,
            transfer_id=str(naming.transfer_id),
            began=time.monotonic(),
            exchange=asyncio.create_task(exchange),
        )

    async def release(self, transfer_id: str) -> None:
        """What a router does when its client went away, or a prefill leg was refused."""
        producer = self.engines[PRODUCER]
        address = Address(producer.host, producer.side_channel_port)
        await side_channel.release(address, TransferId(transfer_id), LOSS_S)

    # -- judgement ---------------------------------------------------------------------------------

    def assert_right(self, prompt: Prompt, answer: Completion, tokens: int = OUTPUT_TOKENS) -> None:
        assert answer.error is None, answer.error
        assert answer.token_ids == self.expected[prompt][:tokens]

    def assert_as_configured(self, consumer: str, prompt: Prompt, answer: Completion) -> None:
        """Right; or, where the policy is `fail`, an error without a wrong token before it."""
        if consumer == FAILS and answer.error is not None:
            assert answer.token_ids == self.expected[prompt][: len(answer.token_ids)]
        else:
            self.assert_right(prompt, answer)

    def assert_failed_as_configured(
        self, consumer: str, prompt: Prompt, answer: Completion
    ) -> None:
        """Like the above, when the KV cannot have come."""
        if consumer == FAILS:
            assert answer.error is not None
            assert not answer.token_ids
        else:
            self.assert_right(prompt, answer)

    async def assert_empty(self, within_s: float, *names: str) -> None:
        """Whether the KV pools of the living are empty in time."""
        began = time.monotonic()
        for name in names or self.living():
            while (usage := await asyncio.to_thread(kv_usage, self.engines[name].url)) != 0:
                waited_s = time.monotonic() - began
                assert waited_s < within_s, f"{name}: {usage:.4f} in use after {waited_s:.1f} s"
                await asyncio.sleep(0.05)
            note(f"pool of {name} empty after {time.monotonic() - began:.2f} s")

    async def assert_serves(self, clients: Mapping[str, Client], prompt: Prompt) -> None:
        """Every living consumer gets KV, in both orders of dispatch, and right tokens."""
        for name in (FAILS, RECOMPUTES):
            if not self.engines[name].is_running():
                continue
            for dispatch in Dispatch:
                sent = self.send(clients[name], name, prompt, dispatch=dispatch)
                await sent.exchange
                failure = self.traces.failure(name, sent.transfer_id)
                assert failure is None, failure
                self.assert_right(prompt, sent.decode)
                note(f"then {name}, {dispatch.value}: {sent.decode.first_token_s:.3f} s to a token")

    async def assert_serve_alone(
        self, client: Client, names: Iterable[str], prompt: Prompt
    ) -> None:
        """Right tokens without any transfer."""
        for name in names:
            self.assert_right(prompt, await client.complete(self.engines[name].url, prompt))


def starved_s(engine: Engine) -> float:
    """How long the engine's kvflow thread has waited for a processor so far, says the kernel."""
    waited_s = 0.0
    for comm in Path("/proc").glob("[0-9]*/task/[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if comm.read_text().startswith("kvflow-pp") and (
                os.getpgid(int(comm.parts[2])) == engine.process.pid
            ):
                waited_s += int((comm.parent / "schedstat").read_text().split()[1]) / 1e9
    return waited_s
