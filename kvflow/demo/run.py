"""`kvflow demo`: two engines, requests in each dispatch order, and a judgement.

Everything that is started ends with `demo`, whatever happens: the engines live in one `with`, and
SIGINT and SIGTERM cancel the task around it. Signals are taken at the awaits only, so none can
fall between the start of an engine and the note that it is ours; a second one changes nothing,
since what follows the first is bounded.

The exit status is 0 when every request was good, 1 when one was not or an engine failed, and
128 + the signal's number when one ended the demo early.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvflow.demo import report
from kvflow.demo.engines import (
    EngineFailedError,
    EnginePair,
    EngineSettings,
    kvflow_connector,
    wait_ready_async,
)
from kvflow.demo.loading import loading
from kvflow.demo.model import tiny_model
from kvflow.demo.report import Trial, Verdict, judge
from kvflow.demo.requests import Client, Completion, Dispatch, Endpoints, prompts
from kvflow.demo.router import RouterFailedError
from kvflow.demo.signals import SignalledError, sigterm_as_exception, until_signalled
from kvflow.demo.traces import TRACE_SUFFIX, Journey, find_journey, read_journeys
from kvflow.tracing.lines import UnreadableTraceError

_TRACE_WAIT_S = 3.0
_TRACE_POLL_S = 0.1
_KEEP_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What `kvflow demo` is asked to do."""

    dispatch: tuple[Dispatch, ...] = (Dispatch.CONCURRENT, Dispatch.SEQUENTIAL)
    as_json: bool = False
    """The result as JSON on stdout; everything else then goes to stderr."""
    keep: bool = False
    """Leave the engines up until Ctrl-C, and print commands to try."""
    trace: Path | None = None
    """Where traces and engine logs go; None: a new temporary directory."""
    requests: int = 8
    """Prompts per dispatch order."""
    by_name: bool = False
    """Load the connector by its registered name, not by its module path."""
    mode: str = "push"
    """The consumer's setting of that name."""
    model_directory: Path | None = None
    """Where the tiny model is kept; None: the user's cache."""
    router: bool = False
    """Chats through the router instead, with two producers, of which one is killed."""


def demo(options: DemoOptions) -> int:
    """Runs the demo, and returns the exit status of the command."""
    notes = Console(stderr=True, highlight=False)
    directory = options.trace or Path(tempfile.mkdtemp(prefix="kvflow-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.resolve()
    notes.print(f"traces and engine logs: {directory}", soft_wrap=True)
    try:
        with sigterm_as_exception():
            with notes.status("the tiny model"):
                model = tiny_model(options.model_directory)
            if options.router:
                from kvflow.demo.routed import demo_routed

                work = demo_routed(directory, model, notes, as_json=options.as_json)
            else:
                work = _demo(options, directory, model, notes)
            return asyncio.run(until_signalled(work))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SignalledError:
        return 128 + signal.SIGTERM
    except (EngineFailedError, RouterFailedError, UnreadableTraceError) as error:
        if options.as_json:
            print(report.failure_json(str(error), directory))
        notes.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1


async def _demo(options: DemoOptions, directory: Path, model: Path, notes: Console) -> int:
    out = notes if options.as_json else Console(highlight=False)
    with _pair(options, directory, model) as pair:
        with loading(notes) as progress:
            await wait_ready_async(pair.engines, progress=progress)
        endpoints = Endpoints.of(pair.producer, pair.consumer)
        with notes.status("sending requests"):
            trials = await _trials(options, endpoints)
            verdicts = await judged(trials, directory)
        for engine in pair.engines:
            if not engine.is_running():
                notes.print(engine.failure("died"), style="red", markup=False, soft_wrap=True)
        report.print_table(out, verdicts)
        report.print_problems(out, verdicts)
        if options.as_json:
            print(report.as_json(verdicts, directory), flush=True)
        if options.keep:
            out.print(report.verdict_line(verdicts))
            out.print(report.curl_commands(endpoints), markup=False, soft_wrap=True)
            await _keep(pair, out)
    out.print(report.verdict_line(verdicts))
    return 0 if report.is_success(verdicts) else 1


def _pair(options: DemoOptions, directory: Path, model: Path) -> EnginePair:
    producer, consumer = (
        EngineSettings(
            name=name,
            model=model,
            log_path=directory / f"{name}.log",
            kv_transfer_config=kvflow_connector(
                f"kv_{name}", by_name=options.by_name, mode=options.mode
            ),
            extra_env={"KVFLOW_TRACE": str(directory / f"{name}-%p{TRACE_SUFFIX}")},
        )
        for name in ("producer", "consumer")
    )
    return EnginePair(producer=producer, consumer=consumer)


async def _trials(options: DemoOptions, endpoints: Endpoints) -> list[Trial]:
    """Sends everything, one request at a time, so that no time contains another's wait."""
    asked = prompts(options.requests)
    trials: list[Trial] = []
    async with Client(endpoints) as client:
        references: list[Completion] = [await client.monolithic(prompt) for prompt in asked]
        for dispatch in options.dispatch:
            for prompt, reference in zip(asked, references, strict=True):
                trials.append(
                    Trial(
                        number=len(trials) + 1,
                        dispatch=dispatch,
                        prompt_tokens=len(prompt),
                        monolithic=reference,
                        exchange=await client.disaggregated(prompt, dispatch=dispatch),
                    )
                )
    return trials


async def judged(trials: Sequence[Trial], directory: Path) -> list[Verdict]:
    """Judges the trials; waits a little for lines that the engines still have to write."""
    deadline = time.monotonic() + _TRACE_WAIT_S
    while True:
        journeys = read_journeys(directory)
        found = [
            find_journey(
                journeys,
                transfer_id=trial.exchange.naming.transfer_id,
                request_id=trial.exchange.naming.request_id,
            )
            for trial in trials
            if trial.exchange.error is None
        ]
        if all(map(_is_told, found)) or time.monotonic() > deadline:
            return [judge(trial, journeys) for trial in trials]
        await asyncio.sleep(_TRACE_POLL_S)


def _is_told(journey: Journey | None) -> bool:
    """Whether both traces have come to their good end."""
    return (
        journey is not None
        and journey.reached("consumer", "received")
        and journey.reached("producer", "sent")
    )


async def _keep(pair: EnginePair, out: Console) -> None:
    """Waits for a signal; it ends the wait, not the demo's judgement."""
    out.print("the engines stay up until Ctrl-C")
    try:
        # The end of a process is no event of this loop.
        while all(engine.is_running() for engine in pair.engines):  # noqa: ASYNC110
            await asyncio.sleep(_KEEP_POLL_S)
        out.print("an engine has ended; see its log", style="red")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
