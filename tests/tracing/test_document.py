"""specs/tracing.md says what is so: its examples are what the commands print."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvflow.cli import app
from kvflow.testing.traces import Tape
from kvflow.tracing.lines import Line
from kvflow.tracing.parts import LOOKS, Part
from kvflow.tracing.waterfall import Outcome

DOCUMENT = (Path(__file__).parents[2] / "specs" / "tracing.md").read_text(encoding="utf-8")


def example() -> list[Tape]:
    """Both legs at once; decode after prefill; one without an answer. P's clock is 3.2 s ahead."""
    ahead = {"P": 3.2}
    both = Tape(of="chat-1", ahead_s=ahead)
    p: dict[str, str] = {"request": "p1"}
    c: dict[str, str] = {"request": "c1"}
    both.vllm(0, "producer", "arrived", tokens=2048, **p)
    both.vllm(0.3, "consumer", "arrived", tokens=2048, **c)
    both.load(4, "blocks_allocated", "new", "allocated", **c)
    both.load(4.1, "peer_met", "allocated", "registering", **c)
    both.vllm(9, "producer", "scheduled", **p)
    both.prefill(9.2, "prefill_started", "unknown", "allocated", **p)
    both.prefill(9.5, "registered", "allocated", "registered", **p)
    both.load(9.8, "accepted", "registering", "registered", **c)
    both.prefill(61, "prefill_finished", "registered", "transferring", **p)
    both.order(61.1, 68, "write", ms={"plan": 0.6, "post": 1.7}, bytes=134217728, **p)
    both.prefill(68.1, "write_done", "transferring", "sent", bytes=134217728, runs=64, **p)
    both.load(68.9, "done", "registered", "received", **c)
    both.vllm(77, "consumer", "first_token", **c)
    after = Tape(of="chat-2", ahead_s=ahead)
    after.attempt = 32
    p, c = {"request": "p2"}, {"request": "c2"}
    after.vllm(100, "producer", "arrived", tokens=512, **p)
    after.vllm(101, "producer", "scheduled", **p)
    after.prefill(101.1, "prefill_started", "unknown", "allocated", **p)
    after.prefill(118, "prefill_finished", "allocated", "prefilled", **p)
    after.vllm(123, "consumer", "arrived", tokens=512, **c)
    after.load(124, "blocks_allocated", "new", "allocated", **c)
    after.load(124.1, "peer_met", "allocated", "registering", **c)
    after.prefill(124.5, "registered", "prefilled", "transferring", **p)
    after.order(124.6, 127, "write", ms={"plan": 0.3, "post": 0.5}, bytes=33554432, **p)
    after.prefill(127.1, "write_done", "transferring", "sent", bytes=33554432, runs=64, **p)
    after.load(127.6, "done", "registering", "received", **c)
    after.vllm(133, "consumer", "first_token", **c)
    lost = Tape(of="chat-3", ahead_s=ahead)
    lost.attempt = 48
    c = {"request": "c3"}
    lost.vllm(200, "consumer", "arrived", tokens=512, **c)
    lost.load(201, "blocks_allocated", "new", "allocated", **c)
    lost.load(201.1, "peer_met", "allocated", "registering", **c)
    return [both, after, lost]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: dict[str, str] = {}
    for tape in example():
        for engine in tape.lines:
            texts[engine] = texts.get(engine, "") + tape.text(engine)
    names = {"P": "prefill.ndjson", "C": "decode.ndjson"}
    for engine, text in texts.items():
        (tmp_path / names[engine]).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return list(names.values())


def printed(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    return [line.rstrip() for line in result.stdout.splitlines()]


def quoted(command: str) -> list[str]:
    """The lines after a command in the document, without blank ones."""
    block = next(b for b in re.findall(r"```\n(.*?)```", DOCUMENT, re.DOTALL) if command in b)
    lines = block.split(command, 1)[1].splitlines()
    return [line.rstrip() for line in lines if line.strip() and line.strip() != "..."]


def test_the_summary_in_the_document_is_what_is_printed(files: list[str]) -> None:
    shown = printed("summary", *files)
    example_lines = quoted(f"$ kvflow trace summary {' '.join(files)}")
    assert len(example_lines) > 20
    assert [line for line in example_lines if line not in shown] == []


def test_the_history_in_the_document_is_what_is_printed(files: list[str]) -> None:
    shown = printed("summary", "--transfer", "chat-2", *files)
    example_lines = quoted(f"$ kvflow trace summary --transfer chat-2 {' '.join(files)}")
    assert example_lines == [line for line in shown if line]


def test_every_part_and_every_ending_is_explained() -> None:
    for part in Part:
        assert re.search(rf"^\| `{part.value}` +\| {LOOKS[part].letter} ", DOCUMENT, re.MULTILINE)
    for outcome in Outcome:
        assert f"`{outcome.value}`" in DOCUMENT


def test_every_key_of_a_line_is_in_the_schema() -> None:
    for key in Line.__struct_encode_fields__:
        assert f"`{key}`" in DOCUMENT
