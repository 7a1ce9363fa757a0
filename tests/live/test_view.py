"""What `kvflow top` and `kvflow inspect` make of what engines say, engines with many ranks too."""

import io
import json

import pytest
from rich.console import Console

from kvflow.core.waiting import Whom
from kvflow.ids import Address, Rank
from kvflow.live.account import account
from kvflow.live.client import Found, OfEngine, OfWorker
from kvflow.live.documents import of_inspect, of_top
from kvflow.live.polling import View
from kvflow.live.view import screen
from kvflow.live.words import duration, megabytes, printable
from kvflow.wire import live

HERE = Address("10.0.0.1", 5600)
COUNTS = {"registered": 3, "received": 12}


def row(transfer: str = "t", ms: float = 1000.0, **fields: object) -> live.TransferRow:
    values: dict[str, object] = {
        "machine": "consumer",
        "transfer_id": transfer,
        "part": 0,
        "request_id": f"cmpl-{transfer}",
        "state": "registered",
        "in_state_ms": ms,
        "total_ms": ms + 1,
        "attempt": 16,
        "peer": "10.0.0.2:5600",
        "bytes": 0,
        "reason": None,
        "waits_on": Whom.PRODUCER,
        "waits_for": "DONE from p0",
    }
    return live.TransferRow(**{**values, **fields})


def peer(key: str, silent_ms: float | None, using: int = 1, detail: str = "") -> live.PeerRow:
    return live.PeerRow(
        key=key,
        engine_id="other",
        state="met",
        in_state_ms=5.0,
        silent_ms=silent_ms,
        using=using,
        waiting=0,
        waits_for="",
        detail=detail,
    )


def worker(
    *rows: live.TransferRow,
    rank: Rank = Rank(0, 0),
    count: int | None = None,
    peers: tuple[live.PeerRow, ...] = (),
) -> OfWorker:
    told = live.Live(
        pp_rank=rank.pp,
        tp_rank=rank.tp,
        population=tuple(
            live.Population(machine="consumer", state=state, count=many)
            for state, many in COUNTS.items()
        ),
        live=len(rows) if count is None else count,
        transfers=rows,
        peers_known=len(peers),
        peers=peers,
    )
    return OfWorker(rank=rank, told=told)


def view(*workers: OfWorker, address: Address = HERE, error: str = "") -> View:
    told = live.Windows(engine_id="0123456789", role="kv_consumer", windows=())
    return View(
        address=address,
        engine=OfEngine(address=address, told=told, workers=workers, error=error),
        told=told,
        failing_s=12.34 if error else 0.0,
        tries=3 if error else 0,
    )


def drawn(*views: View, width: int = 200, **options: object) -> list[str]:
    out = io.StringIO()
    options.setdefault("stuck_s", 5.0)
    Console(file=out, width=width).print(screen(views, width=width, **options))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def of(lines: list[str], column: int) -> list[str]:
    """A column of the rows below the table's head."""
    head = next(n for n, line in enumerate(lines) if "waits for" in line)
    return [line.split()[column] for line in lines[head + 1 :] if line]


# -- top -------------------------------------------------------------------------------------------


def test_a_header_names_the_engine_and_counts_its_states() -> None:
    head = drawn(view(worker(row())))[0]
    assert head == "10.0.0.1:5600  kv_consumer  engine 01234567  1 live  " + (
        "consumer: registered 3, received 12"
    )


def test_the_longest_in_its_state_comes_first_over_all_engines_and_ranks() -> None:
    one = view(worker(row("a", 10), row("d", 4000)), worker(row("c", 300), rank=Rank(0, 1)))
    two = view(worker(row("b", 200)), address=Address("10.0.0.2", 5600))
    assert of(drawn(one, two), 1) == ["d", "c", "b", "a"]
    assert of(drawn(one, two), 0)[2] == "10.0.0.2:5600"


def test_with_several_ranks_each_has_its_counts_and_its_rows_name_it() -> None:
    lines = drawn(view(worker(row("a")), worker(row("b"), rank=Rank(0, 1))))
    assert lines[0].endswith("2 ranks")
    assert lines[1].startswith("  pp0.tp0  1 live  consumer: registered 3")
    assert lines[2].startswith("  pp0.tp1  1 live")
    assert any("consumer pp0.tp1" in line for line in lines)


def test_a_rank_that_is_silent_is_shown_beside_those_that_answer() -> None:
    silent = OfWorker(rank=Rank(0, 1), error="pp0.tp1: did not answer in 5.0 s")
    lines = drawn(view(worker(row("a")), silent))
    assert lines[2] == "  pp0.tp1  pp0.tp1: did not answer in 5.0 s"
    assert of(lines, 0) == ["a"]


def test_what_is_stuck_is_marked_from_the_given_time_on() -> None:
    lines = drawn(view(worker(row("a", 4999), row("b", 5000))), stuck_s=5.0)
    marked = {line.split()[0] for line in lines if " ! " in line}
    assert marked == {"b"}


def test_on_a_screen_only_as_much_is_shown_as_there_are_lines_and_the_rest_counted() -> None:
    rows = [row(f"t{n}", 1000.0 - n) for n in range(100)]
    lines = drawn(view(worker(*rows, count=450)), height=24)
    assert len(lines) <= 24
    shown = len(of(lines, 0)) - 1
    assert of(lines, 0)[:2] == ["t0", "t1"]
    assert lines[-1].startswith(f"{450 - shown} more")


def test_what_was_not_asked_for_is_counted_in_a_pipe_too() -> None:
    assert drawn(view(worker(row(), count=201)))[-1].startswith("200 more")
    assert "more" not in drawn(view(worker(row(), count=1)))[-1]


def test_an_engine_that_does_not_answer_says_since_when() -> None:
    lines = drawn(view(error="did not answer in 5.0 s"))
    assert "does not answer since 12.34 s, 3 tries: did not answer in 5.0 s" in lines[0]
    assert lines[-1] == "no live transfers"


def test_one_that_has_not_been_asked_to_the_end_says_so() -> None:
    asking = View(address=HERE, engine=None, told=None, failing_s=0.0, tries=0)
    assert drawn(asking)[0] == "10.0.0.1:5600  is being asked"


def test_peers_on_which_something_depends_are_named_the_most_silent_first() -> None:
    peers = (
        peer("fine:1", 10.0),
        peer("idle:1", 99_000.0, using=0),
        peer("silent:1", 2310.0, detail="pp0.tp0 was silent"),
        *(peer(f"more{n}:1", 5.0) for n in range(4)),
    )
    lines = drawn(view(worker(row(), peers=peers)))
    assert lines[1] == (
        "  peer silent:1 met, silent for 2.31 s, 1 transfers depend on it: pp0.tp0 was silent"
    )
    assert lines[2].startswith("  peer fine:1")
    assert not any("idle:1" in line for line in lines)
    assert "  2 more peers" in lines


def test_parts_bytes_and_reasons_are_shown() -> None:
    part = row("t", part=2, machine="producer", bytes=12_345_678, reason="expired")
    line = next(line for line in drawn(view(worker(part))) if line.startswith("t part 2"))
    assert "(expired)" in line
    assert line.endswith("12.3")


HOSTILE = "\x1b[2J\x1b]0;title\x07\r\nname"


def test_names_from_outside_do_not_steer_the_terminal() -> None:
    hostile = row(HOSTILE, request_id=HOSTILE, peer=HOSTILE, waits_for=HOSTILE, state=HOSTILE)
    odd = view(worker(hostile, peers=(peer(HOSTILE, 1.0, detail=HOSTILE),)))
    text = "\n".join(drawn(odd, view(error=HOSTILE)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "?[2J" in text
    assert "[bold]" in "\n".join(drawn(view(worker(row("[bold]t")))))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_into_a_narrow_terminal(width: int) -> None:
    rows = [row("t" * 37, request_id="r" * 60), row("u", waits_for="w" * 300)]
    lines = drawn(view(worker(*rows)), width=width)
    assert max(map(len, lines)) <= width


def test_in_a_pipe_nothing_is_cut() -> None:
    long = row(
        "t" * 256, request_id="r" * 512, peer="p" * 512, waits_for="w" * 1000, state="s" * 99
    )
    lines = drawn(view(worker(long)), width=4096)
    (line,) = [line for line in lines if line.startswith("tt")]
    assert "…" not in line
    for letter, count in (("t", 256), ("r", 512), ("p", 512), ("w", 1000), ("s", 99)):
        assert letter * count in line


def test_a_wider_screen_shows_more_of_the_ids() -> None:
    rows = [row("t" * 256, request_id="r" * 512)]
    told = [drawn(view(worker(*rows)), width=width)[-1].count("t") for width in (80, 120, 200)]
    assert told == sorted(set(told))
    assert told[0] >= 9


def test_json_has_what_the_screen_has() -> None:
    told = json.loads(
        of_top([view(worker(row("a", 6000), count=3)), view(error="gone")], stuck_s=5.0)
    )
    assert told["v"] == 1
    first, second = told["engines"]
    assert first["ranks"][0]["counts"] == {"consumer": COUNTS}
    assert first["ranks"][0]["left_out"] == 2
    assert (second["error"], second["failing_s"]) == ("gone", 12.34)
    (only,) = told["transfers"]
    assert (only["engine"], only["rank"], only["stuck"]) == ("10.0.0.1:5600", "pp0.tp0", True)
    assert only["waits_on"] == "producer"


# -- inspect ---------------------------------------------------------------------------------------


def inspected(
    rank: Rank, *transfers: str, exact: bool = False, deadline_ms: float = 4200.0
) -> live.Inspected:
    record = live.Record(
        row=row("t", 2310.0),
        spent_ms=(("allocated", 1.2),),
        deadlines=(live.Deadline(what="end", in_ms=deadline_ms, dest="draining", why="too late"),),
        ranks=(
            live.RankRow(pp_rank=0, tp_rank=0, agent="p0", awaits="DONE", outcome="", misses=3),
            live.RankRow(pp_rank=0, tp_rank=1, agent="p1", awaits="", outcome="done", misses=0),
        ),
        facts=(("blocks", "64"),),
        history=(
            live.Move(
                ago_ms=2310.0,
                attempt=16,
                trigger="accepted",
                source="registering",
                dest="registered",
                reason=None,
                detail="",
            ),
        ),
        peer=peer("10.0.0.2:5600", 1200.0),
        detail="a library said so",
    )
    return live.Inspected(
        pp_rank=rank.pp,
        tp_rank=rank.tp,
        exact=exact,
        matched=len(transfers),
        transfers=transfers,
        records=(record,) if len(transfers) == 1 else (),
    )


def found(*each: live.Inspected) -> Found:
    told = live.Windows(engine_id="engine", role="kv_both", windows=())
    return Found(engine=told, inspected=each, errors=())


def test_an_account_has_every_rank_that_knows_the_transfer() -> None:
    both = found(inspected(Rank(0, 0), "t"), inspected(Rank(0, 1), "t"), inspected(Rank(1, 0)))
    lines = account(HERE, both).splitlines()
    assert lines[0] == "t at 10.0.0.1:5600 (kv_both, engine engine)"
    assert [line.split()[0] for line in lines if " as consumer" in line] == ["pp0.tp0", "pp0.tp1"]
    for line in (
        "  state      registered for 2.31 s (a library said so)",
        "  waits for  DONE from p0",
        "             pp0.tp0, p0: awaited: DONE, 3 renewals unanswered",
        "             pp0.tp1, p1: done",
        "  deadlines  in 4.20 s, end -> draining: too late",
        "  peer       10.0.0.2:5600 met for 5 ms, silent for 1.20 s",
        "  history          2.31 s ago  accepted: registering -> registered",
        "  on record  blocks: 64",
    ):
        assert lines.count(line) == 2, line


def test_a_deadline_that_has_passed_is_told_as_passed() -> None:
    text = account(HERE, found(inspected(Rank(0, 0), "t", deadline_ms=-800.0)))
    assert "800 ms ago, end -> draining" in text


def test_where_one_rank_knows_the_whole_id_the_guesses_of_others_do_not_count() -> None:
    mixed = found(inspected(Rank(0, 0), "t", exact=True), inspected(Rank(0, 1), "t1", "t2"))
    assert mixed.transfers == ("t",)
    assert len(mixed.telling) == 1


def test_what_ranks_guess_differently_is_not_one_transfer() -> None:
    assert found(inspected(Rank(0, 0), "t1"), inspected(Rank(0, 1), "t2")).transfers == ("t1", "t2")
    assert found(inspected(Rank(0, 0))).transfers == ()


def test_json_of_one_transfer_has_its_records_by_rank() -> None:
    told = json.loads(of_inspect(HERE, found(inspected(Rank(0, 1), "t"))))
    (record,) = told["records"]
    assert record["rank"] == "pp0.tp1"
    assert record["deadlines"] == [
        {"what": "end", "in_ms": 4200.0, "dest": "draining", "why": "too late"}
    ]
    assert record["ranks"][0]["misses"] == 3
    assert record["peer_record"]["silent_ms"] == 1200.0


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (830.4, "830 ms"),
        (1000, "1.00 s"),
        (2310, "2.31 s"),
        (99_990, "99.99 s"),
        (100_000, "1 min 40 s"),
        (312_000, "5 min 12 s"),
    ],
)
def test_durations(ms: float, text: str) -> None:
    assert duration(ms) == text


def test_sizes_and_names() -> None:
    assert (megabytes(0), megabytes(1_250_000)) == ("", "1.2")
    assert printable("a\x1bb\u202e\nü") == "a?b??ü"
