"""What the demo makes of its engines' traces."""

from pathlib import Path

import pytest

from kvflow.demo import run
from kvflow.demo.traces import find_journey, read_journeys
from kvflow.testing.traces import Tape, decode_after_prefill


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    tape = Tape()
    decode_after_prefill(tape)
    return tape.write(tmp_path)


def test_a_transfers_way_through_both_engines_is_read(traces: list[Path], tmp_path: Path) -> None:
    traces[0].write_text(traces[0].read_text() + '{"v": 2, "machine"')
    journeys = read_journeys(tmp_path)
    journey = find_journey(journeys, transfer_id=None, request_id="c1")
    assert journey is journeys["t"]
    assert journey.reached("producer", "sent")
    assert journey.last_state("consumer") == "received"
    assert (journey.failures(), journey.kv_bytes()) == ([], None)
    spent = {(each.machine, each.state): each.spent_ms for each in journey.state_times()}
    assert spent["producer", "transferring"] == pytest.approx(9, abs=0.01)


def test_a_file_that_is_no_trace_ends_the_demo_with_a_sentence(
    traces: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def judge(*_: object) -> int:
        return len(await run.judged([], tmp_path))

    traces[1].write_text('{"v": 3}\n')
    monkeypatch.setattr(run, "tiny_model", lambda _: tmp_path)
    monkeypatch.setattr(run, "_demo", judge)
    assert run.demo(run.DemoOptions(trace=tmp_path)) == 1
    assert f"{traces[1]}:1: schema version 3" in capsys.readouterr().err
