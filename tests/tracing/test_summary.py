"""`kvflow trace summary`: bars, tables, one transfer's history, JSON, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvflow.cli import app
from kvflow.core import TABLES
from kvflow.testing.scenes import acquainted, both_legs
from kvflow.testing.traces import Tape, write_world
from kvflow.tracing.figures import AWAITS, analyse, percentile, time_in_states, where_time_went
from kvflow.tracing.parts import LOOKS, Part
from kvflow.tracing.terminal import bar, cells, plain, short_names, shortened


def invoke(*arguments: object, columns: int = 100) -> Result:
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, ["trace", *map(str, arguments)], env=environment)


def story(of: str, at: float, prefill: float, ahead_s: float = 0.0, **reason: str) -> Tape:
    """One request, both legs at once, whose prefill takes so many milliseconds."""
    tape = Tape(of=of, ahead_s={"P": ahead_s})
    tape.attempt = int(at) + 16
    tape.vllm(at, "producer", "arrived", request=f"p-{of}")
    tape.vllm(at + 1, "producer", "scheduled", request=f"p-{of}")
    tape.vllm(at, "consumer", "arrived", request=f"c-{of}")
    tape.prefill(at + 1, "prefill_started", "unknown", "allocated", request=f"p-{of}")
    tape.load(at + 1, "blocks_allocated", "new", "allocated", request=f"c-{of}")
    tape.load(at + 1, "peer_met", "allocated", "registering", request=f"c-{of}")
    tape.prefill(at + 2, "registered", "allocated", "registered", request=f"p-{of}")
    tape.load(at + 3, "accepted", "registering", "registered", request=f"c-{of}")
    done = at + 1 + prefill
    tape.prefill(done, "prefill_finished", "registered", "transferring", request=f"p-{of}")
    tape.order(done, done + 4, "write", ms={"plan": 1, "post": 1}, request=f"p-{of}")
    tape.prefill(done + 4, "write_done", "transferring", "sent", request=f"p-{of}")
    tape.load(done + 5, "done", "registered", "received", request=f"c-{of}")
    tape.vllm(done + 7, "consumer", "first_token", request=f"c-{of}")
    return tape


def written(directory: Path, *tapes: Tape) -> list[Path]:
    """All tapes in one file for each engine."""
    texts: dict[str, str] = {}
    for tape in tapes:
        for engine in tape.lines:
            texts[engine] = texts.get(engine, "") + tape.text(engine)
    paths = []
    for engine, text in texts.items():
        paths.append(directory / f"{engine}.ndjson")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """A short request that came first, and a long one."""
    return written(tmp_path, story("short", 0, 10), story("long", 1000, 80))


def test_there_is_a_bar_for_each_request_the_longest_first(two: list[Path]) -> None:
    result = invoke("summary", *two)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "Requests (2)"
    assert re.match(r"long +88\.0 ms  first token  q*p+l?o?w+n*s+$", lines[1])
    assert re.match(r"short +18\.0 ms  first token  q*p+l?o?w+n*s+$", lines[2])
    assert len(lines[1]) == 100
    long, short = (len(line.split()[-1]) for line in lines[1:3])
    assert short == pytest.approx(long * 18 / 88, abs=1)
    assert "\x1b" not in result.stdout


def test_a_sum_of_parts_is_the_time_to_first_token(two: list[Path]) -> None:
    told = json.loads(invoke("summary", "--json", *two).stdout)
    assert [request["transfer"] for request in told["requests"]] == ["long", "short"]
    for request, ttft in zip(told["requests"], (88.0, 18.0), strict=True):
        assert request["span_ms"] == ttft
        assert round(sum(segment["ms"] for segment in request["segments"]), 9) == ttft
    went = {each["part"]: each for each in told["where_time_went"]}
    assert went["span"]["mean_ms"] == 53.0
    assert went["prefill"]["mean_ms"] == 45.0
    assert went["prefill"]["share"] == pytest.approx(90 / 106, abs=1e-6)
    assert sum(each["share"] for each in told["where_time_went"]) == pytest.approx(2.0, abs=1e-5)
    assert told["unfinished"] == []
    assert {"machine": "consumer", "state": "received", "reason": None, "count": 2} in told[
        "endings"
    ]


def test_limit_and_sort_choose_the_bars(two: list[Path]) -> None:
    def shown(*options: object) -> list[str]:
        told = json.loads(invoke("summary", "--json", *options, *two).stdout)
        assert told["where_time_went"][0]["count"] == 2
        return [request["transfer"] for request in told["requests"]]

    assert shown("--limit", 1) == ["long"]
    assert shown("--limit", 0) == []
    assert shown("--sort", "start") == ["short", "long"]
    assert shown("--sort", "prefill") == ["long", "short"]
    assert "Requests (1 of 2)" in invoke("summary", "--limit", 1, *two).stdout
    assert invoke("summary", "--sort", "colour", *two).exit_code == 2


def test_one_can_sort_by_every_part() -> None:
    from kvflow.tracing.cli import SortOption

    assert {each.value for each in SortOption} == {part.value for part in Part} | {"ttft", "start"}


def test_one_transfers_lines_of_both_sides_are_told_in_their_order(tmp_path: Path) -> None:
    paths = written(tmp_path, story("one", 0, 10, ahead_s=-3.2), story("other", 100, 5, -3.2))
    result = invoke("summary", "--transfer", "one", *paths)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    history = lines[next(n for n, line in enumerate(lines) if line.startswith("   ms")) + 1 :]
    machines = [line.split()[3] for line in history]
    assert machines.count("consumer") == 4
    assert machines.count("write") == 1
    times = [float(line.split()[0]) for line in history]
    assert times == sorted(times)
    assert any("registering -> registered" in line for line in history)
    told = json.loads(invoke("summary", "--transfer", "one", "--json", *paths).stdout)
    assert len(told["events"]) == len(history)
    assert told["requests"][0]["outcome"] == "first_token"
    assert {event["engine"] for event in told["events"]} == {"P", "C"}


def test_the_beginning_of_an_id_will_do_if_it_is_one_transfers(two: list[Path]) -> None:
    assert "Transfer short" in invoke("summary", "--transfer", "sh", *two).stdout
    missing = invoke("summary", "--transfer", "nobody", *two)
    assert missing.exit_code == 2
    assert (
        missing.stderr == "kvflow trace: no line of these traces is about the transfer 'nobody'\n"
    )


def test_two_transfers_that_begin_alike_are_not_guessed(tmp_path: Path) -> None:
    paths = written(tmp_path, story("t1", 0, 10), story("t12", 1000, 80), story("t13", 2000, 1))
    assert "Transfer t1\n" in invoke("summary", "--transfer", "t1", *paths).stdout
    result = invoke("summary", "--transfer", "t", *paths)
    assert (result.exit_code, result.stderr) == (2, "kvflow trace: 3 transfers begin with 't'\n")


def test_what_is_unfinished_is_told_with_whom_it_waits_for(tmp_path: Path) -> None:
    tape = Tape()
    tape.load(0, "blocks_allocated", "new", "allocated")
    tape.load(1, "peer_met", "allocated", "registering")
    tape.load(2500, "accepted", "registering", "registered")
    tape.load(5000, "blocks_allocated", "new", "allocated", id="u", request="c2")
    [path] = tape.write(tmp_path)
    told = json.loads(invoke("summary", "--json", path).stdout)
    assert [(each["id"], each["state"], each["for_ms"]) for each in told["unfinished"]] == [
        ("t", "registered", 2500.0),
        ("u", "allocated", 0.0),
    ]
    assert told["unfinished"][0]["awaits"] == "the KV from P:5600"
    text = invoke("summary", path).stdout
    assert "consumer registered for 2.500 s on C pp0.tp0: awaits the KV from P:5600" in text


def test_a_request_that_vllm_has_not_scheduled_is_unfinished_too(tmp_path: Path) -> None:
    tape = Tape()
    tape.vllm(0, "consumer", "arrived")
    tape.vllm(0, "producer", "arrived")
    tape.load(1, "blocks_allocated", "new", "allocated")
    tape.vllm(3, "consumer", "arrived", request="c2", id="u")
    tape.vllm(4, "consumer", "scheduled", request="c2", id="u")
    told = json.loads(invoke("summary", "--json", *tape.write(tmp_path)).stdout)
    assert [(x["machine"], x["engine"]) for x in told["unfinished"]] == [
        ("request", "P"),
        ("consumer", "C"),
    ]


def test_every_state_that_can_be_waited_in_has_a_sentence() -> None:
    for table in TABLES:
        if table.name == "peer":
            continue
        over = table.terminal | {table.initial, "forgotten", "kept"}
        assert {s for m, s in AWAITS if m == table.name} == set(table.states) - over
        for state in set(table.states) - over:
            AWAITS[table.name, state].format(peer="p")


def test_clocks_and_doubts_are_told(tmp_path: Path) -> None:
    tape = story("t", 0, 10, ahead_s=3.2)
    tape.prefill(50, "prefill_started", "unknown", "allocated", engine="P9", id="x")
    text = invoke("summary", *written(tmp_path, tape)).stdout
    assert re.search(r"Clocks, in ms ahead of C|Clocks, in ms ahead of P", text)
    assert re.search(r"3,?[12]\d\d\.\d +1\.\d+", text)
    assert "clock of P9: no message links it to" in text
    assert "offset 0" in text


def test_a_torn_last_line_is_told_on_stderr_and_the_rest_is_used(two: list[Path]) -> None:
    with two[0].open("a") as file:
        file.write('{"v":2,"t":18000')
    result = invoke("summary", "--json", *two)
    assert result.exit_code == 0
    assert result.stderr == f"{two[0]}: the last line is not finished; left out\n"
    assert len(json.loads(result.stdout)["requests"]) == 2


def test_what_is_no_trace_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    path = tmp_path / "not.ndjson"
    path.write_text("hello\n" * 2)
    result = invoke("summary", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"kvflow trace: {path}:1: not JSON: ")
    assert len(result.stderr.splitlines()) == 1
    assert invoke("summary").exit_code == 2


def test_an_empty_trace_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.ndjson"
    path.write_text("")
    result = invoke("summary", path)
    assert result.exit_code == 0
    assert "no request" in result.stdout
    assert json.loads(invoke("summary", "--json", path).stdout)["requests"] == []


def test_what_a_peer_said_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    tape = Tape(of="t\x1b[2J[bold]x\n")
    tape.load(0, "blocks_allocated", "new", "allocated")
    tape.load(
        9, "expired", "allocated", "failed", reason="\x1b]0;\x07", detail="[red]\x9b31m\u202e"
    )
    [path] = tape.write(tmp_path)
    for options in ((), ("--transfer", "t")):
        text = invoke("summary", *options, path).stdout
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert "t\\x1b[2J[bold]x\\n" in text


@pytest.mark.parametrize("columns", [20, 60, 80, 200])
def test_bars_are_as_wide_as_the_terminal(two: list[Path], columns: int) -> None:
    bars = invoke("summary", *two, columns=columns).stdout.splitlines()[1:3]
    assert len(bars[0]) == max(columns, len("short  88.0 ms  first token  ") + 20)


def test_in_a_terminal_bars_are_coloured_letters(two: list[Path]) -> None:
    console = Console(force_terminal=True, color_system="truecolor", width=80, _environ={})
    analysis = analyse(two)
    with console.capture() as captured:
        console.print(bar(analysis.waterfalls[0], 40, 18_000, console))
    red, green, blue = (int(LOOKS[Part.PREFILL].colour[n : n + 2], 16) for n in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}m" in captured.get()
    assert re.sub(r"\x1b\[[\d;]*m", "", captured.get()).strip().count("p") == 22


def test_a_bars_characters_are_its_span_and_no_error_adds_up(two: list[Path]) -> None:
    fall = analyse(two).waterfalls[1]
    for width in range(200):
        assert sum(count for _, count in cells(fall, width, fall.span_us)) == width
    assert cells(fall, 10, 0) == []


def test_seconds_in_states_are_those_between_lines(tmp_path: Path) -> None:
    world, producer, consumer = acquainted()
    done, _ = both_legs(producer, consumer)
    producer.finish(done)
    world.advance(1.0)
    spent = {
        (s.machine, s.state): s.spread
        for s in time_in_states(analyse(write_world(world, tmp_path)).traces)
    }
    assert spent["consumer", "registered"].count == 2
    assert spent["producer", "transferring"].p50_ms == pytest.approx(2.5, abs=0.01)
    assert ("consumer", "received") not in spent
    assert ("peer", "meeting") in spent


def test_percentiles_lie_between_the_nearest_ones() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([7.0], 0.99) == 7
    assert percentile([0.0, 10.0], 0.5) == 5
    assert percentile([float(n) for n in range(101)], 0.9) == 90


def test_names_of_engines_are_as_short_as_they_can_be() -> None:
    names = short_names(["abcdefgh-1", "abcdefgh-2", "x"])
    assert names == {"abcdefgh-1": "abcdefgh-1", "abcdefgh-2": "abcdefgh-2", "x": "x"}
    assert short_names(["0123456789", "9876543210"])["0123456789"] == "01234567"
    assert shortened("abcdefghij", 5) == "ab…ij"
    assert plain("a\tb") == "a\\tb"


def test_only_requests_that_got_what_they_were_for_are_counted(tmp_path: Path) -> None:
    failed = Tape(of="u")
    failed.load(0, "blocks_allocated", "new", "allocated", request="c9")
    failed.load(60_000, "expired", "allocated", "failed", reason="unreachable", request="c9")
    analysis = analyse(written(tmp_path, story("t", 0, 10), failed))
    assert where_time_went(analysis.waterfalls)[0].max_ms == 18.0
    text = invoke("summary", *[file.path for file in analysis.traces.files]).stdout
    assert "Requests (1)" in text
    assert "Requests without their KV, or not at their end (1)" in text
    assert re.search(r"u +60,000\.0 ms  failed \(unreachable\)  r+\n", text)


def test_help_teaches_and_names_the_commands() -> None:
    told: dict[str, Any] = {}
    for command in ((), ("summary",), ("perfetto",), ("html",)):
        result = invoke(*command, "--help")
        assert result.exit_code == 0
        told[" ".join(command)] = re.sub(r"\s+", " ", result.stdout)
    assert "KVFLOW_TRACE=" in told[""]
    assert "critical path" in told["summary"]
