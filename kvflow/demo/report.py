"""What the demo says: one judgement per request, a table or JSON, and commands to try by hand.

A request is good when its tokens are those of the monolithic run *and* the consumer's trace says
that its KV was received. Without the second half a consumer that quietly computes the prompt by
itself would look right.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvflow.demo.engines import Json
from kvflow.demo.requests import Completion, Dispatch, Endpoints, Exchange
from kvflow.demo.traces import Journey, find_journey

Column: TypeAlias = tuple[str, str]
"""A machine and one of its states."""

_STATE_ORDER = (
    *("held", "allocated", "registering", "registered", "prefilled", "transferring"),
    *("expecting", "reading", "lent", "preempted", "draining", "stopping", "fencing"),
)
_TABLE_WIDTH = 160
_CURL_PROMPT = "A request that goes through two engines has two legs, and its KV cache a journey."


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One request through both engines, and what the producer alone made of the same prompt."""

    number: int
    dispatch: Dispatch
    prompt_tokens: int
    monolithic: Completion
    exchange: Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A trial, judged."""

    trial: Trial
    journey: Journey | None
    is_identical: bool
    problem: str | None
    """Why the request is not good; None: it is."""


def judge(trial: Trial, journeys: dict[str, Journey]) -> Verdict:
    """Compares a trial's tokens, and looks for its KV in the traces."""
    naming = trial.exchange.naming
    journey = find_journey(journeys, transfer_id=naming.transfer_id, request_id=naming.request_id)
    tokens = _token_problem(trial)
    problems = [text for text in (tokens, _journey_problem(journey)) if text is not None]
    return Verdict(
        trial=trial,
        journey=journey,
        is_identical=tokens is None,
        problem="; ".join(problems) or None,
    )


def verdict_line(verdicts: Sequence[Verdict]) -> str:
    """The demo's last line."""
    identical = sum(verdict.is_identical for verdict in verdicts)
    return f"demo: {identical}/{len(verdicts)} requests token-identical"


def is_success(verdicts: Sequence[Verdict]) -> bool:
    return bool(verdicts) and all(verdict.problem is None for verdict in verdicts)


def print_table(console: Console, verdicts: Sequence[Verdict]) -> None:
    """One row per request; milliseconds in each state come from the traces.

    A column per state; a terminal too narrow for that gets a column per machine.
    """
    if not console.is_terminal:
        console.width = max(console.width, _TABLE_WIDTH)  # a file does not wrap
    columns = _state_columns(verdicts)
    table = _table(verdicts, [(column,) for column in columns])
    unbounded = console.options.update(max_width=10 * _TABLE_WIDTH)
    if console.measure(table, options=unbounded).maximum > console.width:
        machines = dict.fromkeys(machine for machine, _ in columns)
        by_machine = [tuple(c for c in columns if c[0] == machine) for machine in machines]
        table = _table(verdicts, by_machine)
    console.print(table)


def print_problems(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Says which requests are not good, and why."""
    for verdict in verdicts:
        if verdict.problem is not None:
            trial = verdict.trial
            text = (
                f"request {trial.number} ({trial.dispatch.value}, {trial.prompt_tokens} tokens, "
                f"{_name(trial.exchange)}): {verdict.problem}"
            )
            console.print(Text(text, style="red"), soft_wrap=True)


def as_json(verdicts: Sequence[Verdict], directory: Path) -> str:
    """The whole result for a program."""
    result: dict[str, Json] = {
        "version": 1,
        "ok": is_success(verdicts),
        "error": None,
        "identical": sum(verdict.is_identical for verdict in verdicts),
        "total": len(verdicts),
        "directory": str(directory),
        "requests": [_request_json(verdict) for verdict in verdicts],
    }
    return json.dumps(result, indent=2)


def failure_json(error: str, directory: Path) -> str:
    """The result when no request could be judged."""
    result: dict[str, Json] = {
        "version": 1,
        "ok": False,
        "error": error,
        "identical": 0,
        "total": 0,
        "directory": str(directory),
        "requests": [],
    }
    return json.dumps(result, indent=2)


def curl_commands(endpoints: Endpoints) -> str:
    """Commands for a shell that send both legs of one request, at once or one after the other."""
    prefill = _curl(endpoints, endpoints.producer_url, 1, '"do_remote_decode": true')
    decode = _curl(
        endpoints,
        endpoints.consumer_url,
        16,
        f'"do_remote_prefill": true, "remote_host": "{endpoints.side_channel_host}", '
        f'"remote_port": {endpoints.side_channel_port}',
    )
    return f"""\
# Both legs at once: the decode leg reserves its blocks and registers with the producer while the
# prefill leg still computes. The transfer id is all that the legs share: a new one each time.
ID="demo-$(date +%s%N)"
{prefill} >/dev/null &
{decode}
echo; wait
# One after the other: the same two commands with a new ID, the first without the '&'."""


def _curl(endpoints: Endpoints, url: str, tokens: int, params: str) -> str:
    body = (
        f'{{"model": "{endpoints.model}", "prompt": "{_CURL_PROMPT}", "max_tokens": {tokens}, '
        f'"temperature": 0, "kv_transfer_params": {{{params}, "transfer_id": "'
    )
    data = f"""{shlex.quote(body)}"$ID"'"}}}}'"""
    return f"curl -sS {url}/v1/completions -H 'Content-Type: application/json' -d {data}"


def _token_problem(trial: Trial) -> str | None:
    if trial.exchange.error is not None:
        return trial.exchange.error
    if trial.monolithic.error is not None:
        return f"monolithic run: {trial.monolithic.error}"
    expected, got = trial.monolithic.token_ids, trial.exchange.decode.token_ids
    if got == expected:
        return None if expected else "no tokens came back"
    for place, (ours, theirs) in enumerate(zip(got, expected, strict=False), start=1):
        if ours != theirs:
            return f"token {place} of {len(expected)} is {ours}, and {theirs} in the monolithic run"
    return f"{len(got)} tokens, and {len(expected)} in the monolithic run"


def _journey_problem(journey: Journey | None) -> str | None:
    if journey is None:
        return "no trace of its transfer"
    if journey.reached("consumer", "received"):
        return None
    why = "; ".join(journey.failures()) or f"last seen {journey.last_state('consumer') or 'never'}"
    return f"its KV was not received: {why}"


def _state_columns(verdicts: Sequence[Verdict]) -> list[Column]:
    seen = {
        (time.machine, time.state)
        for verdict in verdicts
        if verdict.journey is not None
        for time in verdict.journey.state_times()
    }
    order = {state: place for place, state in enumerate(_STATE_ORDER)}
    return sorted(seen, key=lambda c: (c[0] != "producer", order.get(c[1], len(order)), c[1]))


def _table(verdicts: Sequence[Verdict], groups: Sequence[Sequence[Column]]) -> Table:
    """A group of states shares one column; alone in its group, a state is named in the heading."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("#", no_wrap=True)
    table.add_column("dispatch", no_wrap=True)
    table.add_column("prompt\ntokens", justify="right", no_wrap=True)
    table.add_column("KV\nbytes", justify="right", no_wrap=True)
    for group in groups:
        machine, state = group[0]
        heading = f"{machine}\n{state}\nms" if len(group) == 1 else f"{machine}\nms"
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("first\ntoken\nms", justify="right", no_wrap=True)
    table.add_column("mono-\nlithic\nms", justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    for verdict in verdicts:
        table.add_row(*_cells(verdict, groups))
    return table


def _cells(verdict: Verdict, groups: Sequence[Sequence[Column]]) -> list[Text | str]:
    trial, journey = verdict.trial, verdict.journey
    spent = {(t.machine, t.state): t.spent_ms for t in journey.state_times()} if journey else {}
    kv_bytes = journey.kv_bytes() if journey else None
    return [
        str(trial.number),
        trial.dispatch.value,
        f"{trial.prompt_tokens:,}",
        "-" if kv_bytes is None else f"{kv_bytes:,}",
        *(_spent(spent, group) for group in groups),
        _milliseconds(trial.exchange.decode.first_token_s),
        _milliseconds(trial.monolithic.first_token_s),
        Text("identical", style="green") if verdict.is_identical else Text("wrong", style="red"),
    ]


def _spent(spent: Mapping[Column, float], group: Sequence[Column]) -> str:
    if len(group) == 1:
        return f"{spent[group[0]]:.1f}" if group[0] in spent else "-"
    return "\n".join(f"{c[1]} {spent[c]:.1f}" for c in group if c in spent) or "-"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def _name(exchange: Exchange) -> str:
    return exchange.naming.transfer_id or exchange.naming.request_id or "unnamed"


def _request_json(verdict: Verdict) -> dict[str, Json]:
    trial, journey = verdict.trial, verdict.journey
    states: dict[str, dict[str, Json]] = {"producer": {}, "consumer": {}}
    for time in journey.state_times() if journey else []:
        states[time.machine][time.state] = round(time.spent_ms, 3)
    first, alone = trial.exchange.decode.first_token_s, trial.monolithic.first_token_s
    return {
        "request": trial.number,
        "dispatch": trial.dispatch.value,
        "prompt_tokens": trial.prompt_tokens,
        "transfer_id": trial.exchange.naming.transfer_id,
        "identical": verdict.is_identical,
        "received": journey is not None and journey.reached("consumer", "received"),
        "problem": verdict.problem,
        "kv_bytes": journey.kv_bytes() if journey else None,
        "states_ms": states,
        "first_token_ms": None if first is None else round(first * 1000, 3),
        "monolithic_first_token_ms": None if alone is None else round(alone * 1000, 3),
        "token_ids": trial.exchange.decode.token_ids,
    }
