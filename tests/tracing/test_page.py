"""`kvflow trace html`: one page that needs nothing else, and whose bars add up.

The last tests open it in a Chromium, where there is one.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvflow.cli import app
from kvflow.testing.traces import Tape
from kvflow.tracing.figures import analyse
from kvflow.tracing.page import as_html
from kvflow.tracing.parts import LOOKS, Part

Attributes = dict[str, str]
EVIL = "<script>alert(1)</script>\"'&</td><!--]]>"
VOID = {"meta", "input", "br"}


@dataclass
class Page(HTMLParser):
    """What a page has: rows with their segments, scripts, all elements and all text."""

    rows: list[Attributes] = field(default_factory=list)
    segments: list[list[Attributes]] = field(default_factory=list)
    elements: list[tuple[str, Attributes]] = field(default_factory=list)
    scripts: list[tuple[Attributes, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.elements.append((tag, known))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr" and known.get("class") == "request":
            self.rows.append(known)
            self.segments.append([])
        elif "data-part" in known:
            self.segments[-1].append(known)
        elif tag == "script":
            self.scripts.append((known, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        else:
            self.texts.append(data)


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def request(number: int, **words: str) -> Tape:
    """One of several requests; each takes longer than the one before."""
    tape = Tape(of=words.get("of", f"t{number}"), ahead_s={"P": 1.5})
    tape.attempt = 16 * number + 16
    at = 1000.0 * number
    mine, theirs = {"request": f"c{number}"}, {"request": f"p{number}"}
    tape.vllm(at, "consumer", "arrived", **mine)
    tape.vllm(at + 0.2, "producer", "arrived", **theirs)
    tape.prefill(at + 1.001, "prefill_started", "unknown", "allocated", **theirs)
    tape.load(at + 1, "blocks_allocated", "new", "allocated", **mine)
    tape.load(at + 1.5, "peer_met", "allocated", "registering", **mine)
    tape.prefill(at + 2, "registered", "allocated", "registered", **theirs)
    tape.load(at + 2.5, "accepted", "registering", "registered", **mine)
    done = at + 10 + 7.77 * number
    tape.prefill(done, "prefill_finished", "registered", "transferring", **theirs)
    tape.order(done + 0.1, done + 3, "write", ms={"plan": 0.333, "post": 1.01}, **theirs)
    tape.prefill(done + 3.1, "write_done", "transferring", "sent", **theirs)
    tape.load(done + 4, "done", "registered", "received", **mine)
    tape.vllm(done + 6, "consumer", "first_token", **mine)
    return tape


def made(directory: Path, *tapes: Tape) -> str:
    paths = []
    for number, tape in enumerate(tapes):
        folder = directory / str(number)
        folder.mkdir()
        paths += tape.write(folder)
    return as_html(analyse(paths))


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return parsed(made(tmp_path, *[request(number) for number in range(5)]))


def test_there_is_one_bar_for_each_request_and_its_parts_add_up_to_its_time(page: Page) -> None:
    assert [row["data-id"] for row in page.rows] == ["t4", "t3", "t2", "t1", "t0"]
    assert len([1 for _, known in page.elements if known.get("class") == "bar"]) == 5
    for row, segments in zip(page.rows, page.segments, strict=True):
        assert sum(Decimal(each["data-ms"]) for each in segments) == Decimal(row["data-ttft"])
        number = int(row["data-id"][1:])
        assert Decimal(row["data-ttft"]) == Decimal("16") + Decimal("7.77") * number
        for part in Part:
            of_part = [Decimal(s["data-ms"]) for s in segments if s["data-part"] == part]
            if of_part:
                assert sum(of_part) == Decimal(row[f"data-{part.value.replace('_', '')}"])


def test_each_part_says_what_it_is_without_colours(page: Page) -> None:
    for segments in page.segments:
        assert all(re.fullmatch(r"[a-z ]+ [\d.,]+ ms", each["title"]) for each in segments)
    bars = [known for _, known in page.elements if known.get("class") == "bar"]
    assert all("prefill" in bar["aria-label"] for bar in bars)


def test_every_column_that_sorts_has_its_key_in_every_row(page: Page) -> None:
    keys = [
        known["data-key"] for tag, known in page.elements if tag == "th" and "data-key" in known
    ]
    assert {"ttft", "start", "queue", "prefill", "wire", "notice", "step"} <= set(keys)
    for row in page.rows:
        for key in keys:
            float(row[f"data-{key}"])
    sorted_by = [k["aria-sort"] for t, k in page.elements if t == "th" and "data-key" in k]
    assert sorted_by.count("descending") == 1


def test_the_page_needs_nothing_else_and_its_policy_lets_only_its_script_run(page: Page) -> None:
    text = "".join(script for _, script in page.scripts)
    assert not any({"src", "href", "action", "srcset"} & known.keys() for _, known in page.elements)
    assert not any(key.startswith("on") for _, known in page.elements for key in known)
    assert not re.search(r"https?:|//\w|url\(|@import|fetch\(|XMLHttpRequest|innerHTML", text)
    [policy] = [k["content"] for _, k in page.elements if "http-equiv" in k]
    [running] = [script for known, script in page.scripts if "type" not in known]
    digest = base64.b64encode(hashlib.sha256(running.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_script_finds_each_rows_history(page: Page) -> None:
    [(_, text)] = [each for each in page.scripts if each[0].get("type") == "application/json"]
    data = json.loads(text)
    for row in page.rows:
        events = data["transfers"][int(row["data-transfer"])]
        assert len(events) == 12
        assert [float(event[0]) for event in events] == sorted(float(event[0]) for event in events)
        assert {data["workers"][event[1]].split()[0] for event in events} == {"P", "C"}
        assert ["registering", "registered"] in [event[4:6] for event in events]


def test_ids_and_details_from_the_network_stay_text(tmp_path: Path) -> None:
    tape = request(1, of=EVIL)
    tape.load(2000, "expired", "allocated", "failed", reason=EVIL, detail=EVIL, request=EVIL)
    tape.load(2001, "blocks_allocated", "new", "allocated", request="c8", engine=EVIL, rank=EVIL)
    text = made(tmp_path, tape, request(0))
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    evil = parsed(text)
    (tmp_path / "plain").mkdir()
    plain = parsed(made(tmp_path / "plain", request(1), request(0)))
    assert len(evil.scripts) == len(plain.scripts) == 2
    assert {tag for tag, _ in evil.elements} == {tag for tag, _ in plain.elements}
    added = {key for _, k in evil.elements for key in k} - {k for _, x in plain.elements for k in x}
    assert added <= {"data-givingup", "data-registration"}
    assert EVIL in "".join(evil.texts)
    assert any(row["data-id"] == EVIL for row in evil.rows)
    [(_, histories)] = [each for each in evil.scripts if each[0].get("type")]
    assert "<" not in histories
    assert EVIL in json.dumps(json.loads(histories)).replace('\\"', '"')


def test_control_characters_are_spelled_out(tmp_path: Path) -> None:
    text = made(tmp_path, request(1, of="a\x00b\x1b\u2028\u202e"))
    assert not re.search("[\x00-\x09\x0b-\x1f\u2028\u202e]", text)
    assert "a\\x00b\\x1b\\u2028\\u202e" in text


def test_where_time_went_and_the_rest_is_there_without_a_script(page: Page) -> None:
    text = " ".join(page.texts)
    for title in ("Where time went, in ms, over 5 requests", "Endings", "Seconds in each state"):
        assert title in text
    assert "Clocks, in ms ahead of" in text
    assert "time to first token" in text
    assert LOOKS[Part.PREFILL].meaning in text


def test_what_is_unfinished_has_a_table(tmp_path: Path) -> None:
    tape = Tape()
    tape.load(0, "blocks_allocated", "new", "allocated")
    text = made(tmp_path, tape)
    assert "Unfinished when the traces end (1)" in text
    assert "the meeting with P:5600" in text
    assert "Where time went" not in text


def test_an_empty_trace_is_a_page(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_text("")
    assert parsed(as_html(analyse([path]))).rows == []


def test_a_thousand_requests_are_a_page_of_some_megabytes(tmp_path: Path) -> None:
    texts: dict[str, str] = {}
    for number in range(1000):
        tape = request(number)
        for engine in tape.lines:
            texts[engine] = texts.get(engine, "") + tape.text(engine)
    paths = [tmp_path / engine for engine in texts]
    for path in paths:
        path.write_text(texts[path.name])
    text = as_html(analyse(paths))
    assert len(parsed(text).rows) == 1000
    assert len(text) < 5e6


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    paths = request(1).write(tmp_path)
    out = tmp_path / "out.html"
    done = CliRunner().invoke(app, ["trace", "html", *map(str, paths), "-o", str(out)])
    assert (done.exit_code, done.output) == (0, "")
    assert out.read_text() == as_html(analyse(paths))
    assert CliRunner().invoke(app, ["trace", "html", str(out)]).exit_code == 2


# -- in a browser ----------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)


def dumped(path: Path, fragment: str = "") -> str:
    """The page's elements after its script has run."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={path.parent / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            f"{path.as_uri()}{fragment}",
        ],
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason=f"there is none of {', '.join(BROWSERS)}")
def test_a_browser_shows_all_bars_and_opens_a_history(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(made(tmp_path, *[request(number) for number in range(5)]), encoding="utf-8")
    closed = dumped(path)
    assert 'data-ready="yes"' in closed
    shown = parsed_loosely(closed)
    assert len(shown.rows) == 5
    for row, segments in zip(shown.rows, shown.segments, strict=True):
        assert sum(Decimal(each["data-ms"]) for each in segments) == Decimal(row["data-ttft"])
    assert 'class="history"' not in closed
    opened = dumped(path, "#t3")
    assert opened.count('class="history"') == 1
    assert "request c3 on C; producer P" in opened
    assert opened.count(">registering</td>") - closed.count(">registering</td>") == 2


@pytest.mark.skipif(BROWSER is None, reason=f"there is none of {', '.join(BROWSERS)}")
def test_a_browser_runs_no_script_of_an_id(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    evil = "<script>document.title='taken'</script>"
    path.write_text(made(tmp_path, request(1, of=evil)), encoding="utf-8")
    dom = dumped(path, "#" + re.sub(r"[^a-z]", lambda m: f"%{ord(m[0]):02X}", evil))
    assert 'data-ready="yes"' in dom
    assert "<title>kvflow trace" in dom
    assert 'class="history"' in dom


def parsed_loosely(text: str) -> Page:
    """Of what a browser prints: it adds elements of its own."""
    page = Page()
    page.feed(text)
    return page
