"""The documents that are drawn from the tables, and their copies in specs/."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvflow.cli import app
from kvflow.core import TABLES, Table

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "kvflow states --write specs"


def states(*options: str) -> str:
    result = CliRunner().invoke(app, ["states", *options])
    assert result.exit_code == 0, result.output
    return result.output


def by_name(name: str) -> Table:
    return next(table for table in TABLES if table.name == name)


def test_json_has_every_machine_state_row_and_impossible_pair() -> None:
    document = json.loads(states("--format", "json"))
    assert document["version"] == 1
    assert [machine["machine"] for machine in document["machines"]] == [t.name for t in TABLES]
    for machine in document["machines"]:
        table = by_name(machine["machine"])
        assert machine["states"] == dict(table.states)
        assert machine["initial"] == table.initial
        assert machine["terminal"] == sorted(table.terminal)
        assert len(machine["rows"]) == len(table.rows)
        for told, row in zip(machine["rows"], table.rows, strict=True):
            assert told["trigger"] == row.trigger
            assert told["from"] == list(row.sources)
            assert told["to"] == row.dest
            assert told["why"] == row.why
        pairs = {(pair["state"], pair["trigger"]) for pair in machine["impossible"]}
        assert pairs == set(table.impossible)


def test_json_covers_every_pair_of_state_and_trigger() -> None:
    for machine in json.loads(states("--format", "json"))["machines"]:
        triggers = {row["trigger"] for row in machine["rows"]}
        told = {(state, row["trigger"]) for row in machine["rows"] for state in row["from"]}
        told |= {(pair["state"], pair["trigger"]) for pair in machine["impossible"]}
        assert told == {(state, trigger) for state in machine["states"] for trigger in triggers}


def test_markdown_explains_every_state_and_row() -> None:
    text = states()
    assert text == states("--format", "markdown")
    for table in TABLES:
        assert f"## {table.name}" in text
        for state, meaning in table.states.items():
            assert f"**{state}**" in text
            assert meaning in text
        assert f"](diagrams/{table.name}.svg)" in text
        for row in table.rows:
            assert row.why in text


@pytest.mark.parametrize("name", [table.name for table in TABLES])
def test_mermaid_draws_every_change_of_state(name: str) -> None:
    text = states("--format", "mermaid", "--machine", name)
    assert text.startswith("stateDiagram-v2\n")
    table = by_name(name)
    assert f"[*] --> {table.initial}" in text
    for row in table.rows:
        for source in row.sources:
            if row.dest not in (None, source):
                (line,) = [
                    line
                    for line in text.splitlines()
                    if line.startswith(f"    {source} --> {row.dest}:")
                ]
                assert row.trigger in line.partition(": ")[2].split("<br>")


@pytest.mark.parametrize("name", [table.name for table in TABLES])
def test_one_machine_can_be_asked_for(name: str) -> None:
    (machine,) = json.loads(states("--format", "json", "--machine", name))["machines"]
    assert machine["machine"] == name


def test_a_machine_that_does_not_exist_is_refused_with_those_that_do() -> None:
    result = CliRunner().invoke(app, ["states", "--machine", "router"])
    assert result.exit_code != 0
    for table in TABLES:
        assert table.name in result.output


def test_the_documents_in_specs_are_what_the_tables_say(tmp_path: Path) -> None:
    states("--write", str(tmp_path))
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    drawn = {Path(f"diagrams/{t.name}.{kind}") for t in TABLES for kind in ("mmd", "svg")}
    assert {Path("states.md"), *drawn} <= {*written}
    stale = [
        str(path)
        for path in written
        if not (ROOT / "specs" / path).is_file()
        or (ROOT / "specs" / path).read_text() != (tmp_path / path).read_text()
    ]
    assert not stale, f"stale in specs/: {', '.join(stale)}; run: {COMMAND}"


def test_no_diagram_in_specs_is_of_a_machine_that_is_gone() -> None:
    drawn = {path.stem for path in (ROOT / "specs" / "diagrams").iterdir()}
    assert drawn <= {table.name for table in TABLES}, f"delete the others, then run: {COMMAND}"
