"""`kvflow bench serve`: pairs of real engines in turn, each under the same load.

A *round* goes through all connectors; for each, a pair of engines is started, and every rate and
length is measured on it. The next round begins with the next connector, so that none always runs
first. Pairs are never up at the same time.

Whatever goes wrong is counted: a request that fails or has other tokens is in its point's records,
a pair that does not start or dies is a problem of the run. The exit status is 0 when everything was
measured and every request was right, 1 when not, and 128 + the signal's number when one ended the
run early. After each pair, the results so far are written to `result.json` beside the logs.
"""

import asyncio
import datetime
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvflow.bench import (
    peers,
    report_data,
    report_figures,
    report_png,
    report_tables,
    serve_meters,
)
from kvflow.bench.report_data import Point, Result, SetUp
from kvflow.bench.serve_connectors import Connector, select
from kvflow.bench.serve_engines import Plan
from kvflow.bench.serve_load import Prompt, Tokens, alone, loads, prompts
from kvflow.bench.serve_options import ServeOptions
from kvflow.bench.serve_pair import PairFailedError, RunningPair, warm_up
from kvflow.demo.engines import Engine, EngineFailedError, EnginePair, wait_ready_async
from kvflow.demo.loading import loading
from kvflow.demo.model import tiny_model
from kvflow.demo.requests import Client, Endpoints
from kvflow.demo.signals import SignalledError, sigterm_as_exception, until_signalled

REQUEST_TIMEOUT_S = 600.0
READY_TIMEOUT_S = 1800.0
"""A large model is loaded and compiled in this time."""
_PAIR_START_GUESS_S = 60.0


def serve(options: ServeOptions) -> int:
    """Runs the benchmark, and returns the exit status of the command."""
    notes = Console(stderr=True, highlight=False)
    selection = select(options.connectors, sequential_too=options.sequential_too)
    for sentence in selection.left_out:
        notes.print(sentence, markup=False, soft_wrap=True)
    if not selection.connectors:
        notes.print("no connector is left to measure", style="red")
        return 1
    directory = options.out or Path(tempfile.mkdtemp(prefix="kvflow-bench-serve-"))
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.resolve()
    notes.print(f"engine logs, traces and result.json: {directory}", soft_wrap=True)
    try:
        with sigterm_as_exception():
            plan = Plan(options=options, model=_model(options), is_cpu=serve_meters.is_cpu_build())
            run = _Run(plan, selection.connectors, selection.left_out, directory, notes)
            return asyncio.run(until_signalled(run.whole()))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SignalledError:
        return 128 + signal.SIGTERM


def rounds(connectors: Sequence[Connector], repeats: int) -> list[tuple[int, Connector]]:
    """Which pair is measured when; each round begins one connector later than the one before."""
    order: list[tuple[int, Connector]] = []
    for number in range(repeats):
        first = number % len(connectors)
        turned = (*connectors[first:], *connectors[:first])
        order += [(number + 1, connector) for connector in turned]
    return order


def _model(options: ServeOptions) -> str:
    if options.model is None:
        return str(tiny_model())
    path = Path(options.model)
    return str(path.resolve()) if path.exists() else options.model


class _Run:
    """One run of the benchmark, and what has come of it so far."""

    def __init__(
        self,
        plan: Plan,
        connectors: Sequence[Connector],
        left_out: tuple[str, ...],
        directory: Path,
        notes: Console,
    ) -> None:
        self._plan = plan
        self._options = plan.options
        self._connectors = connectors
        self._left_out = left_out
        self._directory = directory
        self._notes = notes
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._began = time.monotonic()
        self._machine = serve_meters.machine()
        self._versions = serve_meters.versions()
        self._prompts = {
            length: prompts(self._options.requests, length, str(self._options.seed))
            for length in self._options.lengths
        }
        self._expected: dict[Prompt, Tokens] = {}
        self._set_ups: list[SetUp] = []
        self._points: list[Point] = []
        self._problems: list[str] = []

    async def whole(self) -> int:
        """Every round; prints and writes the results."""
        order = rounds(self._connectors, self._options.repeats)
        for number, (round_number, connector) in enumerate(order):
            self._notes.print(
                f"round {round_number} of {self._options.repeats}, {connector.name}: pair "
                f"{number + 1} of {len(order)}, {self._eta(number, len(order))}"
            )
            try:
                await self._pair(round_number, connector)
            except (EngineFailedError, PairFailedError) as error:
                problem = f"{connector.name}, round {round_number}: {error}"
                self._notes.print(problem, style="red", markup=False, soft_wrap=True)
                self._problems.append(problem)
            self._write(self._directory / "result.json")
        self._report()
        return 0 if self._result().is_good else 1

    async def _pair(self, round_number: int, connector: Connector) -> None:
        """Starts a pair and measures every point of it."""
        directory = self._directory / f"round{round_number}-{connector.key}"
        producer, consumer = self._plan.settings(connector, directory)
        with EnginePair(producer=producer, consumer=consumer) as pair:
            began = time.monotonic()
            with loading(self._notes) as progress:
                await wait_ready_async(pair.engines, timeout_s=READY_TIMEOUT_S, progress=progress)
            ready_s = time.monotonic() - began
            self._set_ups.append(_set_up(self._plan, connector, round_number, pair, ready_s))
            endpoints = Endpoints.of(pair.producer, pair.consumer)
            async with Client(endpoints, timeout_s=REQUEST_TIMEOUT_S) as client:
                await self._reference(client)
                legs = await warm_up(
                    client,
                    connector,
                    self._options.lengths,
                    seed=f"{self._options.seed} warm-up",
                    tokens=self._options.output_tokens,
                )
                measured = RunningPair(engines=pair, client=client, legs=legs, round=round_number)
                for load in loads(
                    self._options, connector, round_number, self._prompts, self._expected
                ):
                    point = await measured.point(load)
                    self._points.append(point)
                    self._notes.print(f"  {_point_line(point)}")
                    _assert_running(pair.engines)

    async def _reference(self, client: Client) -> None:
        """What one engine makes of each prompt; once in a run, by the first pair's producer."""
        asked = [prompt for of_length in self._prompts.values() for prompt in of_length]
        missing = [prompt for prompt in asked if prompt not in self._expected]
        if not missing:
            return
        self._notes.print(f"  {len(missing)} prompts by one engine alone")
        answers = await alone(client, missing, self._options.output_tokens)
        for prompt, answer in zip(missing, answers, strict=True):
            if answer.error is not None:
                raise PairFailedError(f"monolithic run: {answer.error}")
            self._expected[prompt] = answer.token_ids

    def _eta(self, done: int, total: int) -> str:
        if done:
            pair_s = (time.monotonic() - self._began) / done
        else:
            spans = sum(self._options.requests / rate for rate in self._options.rates)
            orders = sum(len(each.dispatches) for each in self._connectors) / len(self._connectors)
            pair_s = _PAIR_START_GUESS_S + spans * len(self._options.lengths) * orders
        return f"about {pair_s * (total - done) / 60:.0f} minutes to go"

    def _result(self) -> Result:
        return Result(
            date=self._date,
            wall_s=time.monotonic() - self._began,
            machine={**self._machine, "load_at_end": list(os.getloadavg())},
            versions=self._versions,
            options={**self._options.json(), "model_path": self._plan.model},
            set_ups=tuple(self._set_ups),
            points=tuple(self._points),
            left_out=self._left_out,
            problems=tuple(self._problems),
        )

    def _write(self, path: Path) -> None:
        rows = [row.json() for row in report_figures.summary(self._points)]
        ratios = [ratio.json() for ratio in report_figures.ratios(self._points)]
        report_data.write(path, report_data.as_json(self._result(), rows, ratios))

    def _report(self) -> None:
        rows = report_figures.summary(self._points)
        report_tables.print_all(
            Console(highlight=False), self._result(), rows, report_figures.ratios(self._points)
        )
        if self._options.json_path is not None:
            self._write(self._options.json_path)
        if self._options.png_path is not None and rows:
            title = f"kvflow bench serve, {self._date}, repeats: {self._options.repeats}"
            report_png.draw(rows, self._options.png_path, title=title)


def _set_up(
    plan: Plan, connector: Connector, round_number: int, pair: EnginePair, ready_s: float
) -> SetUp:
    return SetUp(
        connector=connector.key,
        name=connector.name,
        round=round_number,
        transfer_config=connector.transfer_config("kv_producer"),
        asked=plan.steps(connector),
        steps={engine.name: peers.in_force(engine.log_path) for engine in pair.engines},
        arguments=plan.arguments(),
        ready_s=ready_s,
    )


def _assert_running(engines: Sequence[Engine]) -> None:
    for engine in engines:
        if not engine.is_running():
            raise EngineFailedError(engine.failure("died"))


def _point_line(point: Point) -> str:
    ttft_ms = report_figures.FIGURES["ttft_ms_p50"](point)
    shown = "-" if ttft_ms is None else f"{ttft_ms:.0f} ms"
    right = sum(request.is_right for request in point.requests)
    return (
        f"{point.length} tokens at {point.rate:g}/s, {point.dispatch}: "
        f"TTFT p50 {shown}, {right}/{len(point.requests)} right"
    )
