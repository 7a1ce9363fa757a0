"""A producer's rank that writes to several of a consumer's: one part each, one prefill for all."""

import pytest

from kvflow.core import Reason, Standing
from kvflow.core import effects as ef
from kvflow.core import events as ev
from kvflow.core.notices import Accepted, Alive, Cancel, Done, Failed, Renew
from kvflow.ids import Incarnation, PartId, Rank, part_id, transfer_of
from kvflow.testing import bench as b
from kvflow.testing.bench import C1, C2, PART, Bench, T
from kvflow.testing.scenes import both_legs
from kvflow.testing.world import World

SECOND = part_id(T, 1)
STRANGER = b.AgentName("another")


@pytest.fixture
def bench() -> Bench:
    """A producer's rank, and the two ranks of one consumer."""
    bench = Bench()
    for part, agent in enumerate((C1, C2)):
        introduce(bench, agent, part, 2)
    return bench


def introduce(bench: Bench, agent: b.AgentName, part: int, parts: int) -> None:
    bench.take(
        ev.PeerIntroduced(
            agent=agent,
            incarnation=Incarnation(f"i-{agent}"),
            rank=Rank(0, part),
            part=part,
            parts=parts,
        )
    )


def states(bench: Bench) -> dict[str, str]:
    return {part: record.state for part, record in bench.engine.records.producers.items()}


def written(part: PartId, attempt: int = 5) -> ev.WriteDone:
    return ev.WriteDone(part=part, attempt=attempt, bytes=3, runs=1)


def test_a_part_is_named_by_its_transfer_and_a_number() -> None:
    assert (part_id(T, 0), part_id(T, 2)) == ("t", "t 2")
    assert transfer_of(part_id(T, 2)) == transfer_of(part_id(T, 0)) == T


def test_vllm_gets_a_prefills_blocks_back_with_the_last_part_s3_s5(bench: Bench) -> None:
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    bench.take(written(PART))
    assert states(bench) == {"t": "sent", "t 1": "prefilled"}
    assert bench.all(ef.ReportSent) == []
    bench.hear(C2, b.register())
    bench.take(written(SECOND))
    assert [each.request_id for each in bench.all(ef.ReportSent)] == ["r"]
    assert [isinstance(notice, Done) for notice in bench.sent(C2)][-1]
    assert bench.engine.ledger.empty


def test_each_part_is_written_to_its_own_rank(bench: Bench) -> None:
    bench.take(b.started(), b.finished())
    bench.hear(C2, b.register())
    bench.hear(C1, b.register())
    posts = [(post.part, post.agent) for post in bench.all(ef.PostWrite)]
    assert posts == [(SECOND, C2), (PART, C1)]


@pytest.mark.parametrize("first", [C1, C2])
def test_a_registration_before_the_prefill_makes_every_part_known(
    bench: Bench, first: b.AgentName
) -> None:
    bench.hear(first, b.register())
    bench.take(b.started(), b.finished())
    bench.hear(C2 if first == C1 else C1, b.register())
    assert states(bench) == {"t": "transferring", "t 1": "transferring"}


def test_a_second_part_that_comes_while_the_prompt_is_computed_sees_its_end(bench: Bench) -> None:
    bench.take(b.started())
    bench.hear(C1, b.register())
    assert states(bench) == {"t": "registered", "t 1": "allocated"}
    bench.take(b.finished())
    assert states(bench) == {"t": "transferring", "t 1": "prefilled"}


def test_a_preempted_prefill_is_preempted_for_every_part(bench: Bench) -> None:
    bench.take(b.started(), b.preempted())
    bench.hear(C2, b.register())
    assert states(bench) == {"t": "preempted", "t 1": "held"}


def test_a_transfer_that_is_over_is_over_for_the_part_that_comes_last(bench: Bench) -> None:
    bench.take(b.started(), b.aborted())
    bench.hear(C1, b.register())
    bench.hear(C2, b.register())
    assert {notice.reason for notice in bench.sent() if isinstance(notice, Failed)} == {
        Reason.ABORTED
    }


def test_a_release_by_a_router_is_one_of_all_parts(bench: Bench) -> None:
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    bench.take(written(PART), ev.ReleaseAsked(transfer_id=T))
    assert len(bench.all(ef.ReportSent)) == 1
    assert bench.engine.ledger.empty


def test_a_cancel_ends_the_part_of_its_sender_only(bench: Bench) -> None:
    bench.take(b.started(), b.finished())
    bench.hear(C2, Cancel(transfer_id=T, attempt=5))
    assert states(bench) == {"t": "prefilled", "t 1": "failed"}
    assert bench.all(ef.ReportSent) == []
    bench.hear(C1, Cancel(transfer_id=T, attempt=5))
    assert len(bench.all(ef.ReportSent)) == 1


def test_a_renewal_is_answered_of_the_part_of_its_sender(bench: Bench) -> None:
    bench.take(b.started())
    bench.hear(C1, b.register())
    bench.hear(C2, Renew(wanted=((T, 5),), write_until_s=None))
    (alive,) = [notice for notice in bench.sent(C2) if isinstance(notice, Alive)]
    assert [standing for _, _, standing, _ in alive.standings] == [Standing.UNKNOWN]
    assert isinstance(bench.sent(C1)[-1], Accepted)


def test_a_consumer_of_one_rank_does_not_pin_what_one_of_two_had_left(bench: Bench) -> None:
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    bench.hear(C1, Cancel(transfer_id=T, attempt=5))
    bench.take(ev.WriteStopped(part=PART, attempt=5))
    introduce(bench, STRANGER, 0, 1)
    bench.hear(STRANGER, b.register(7))
    bench.wait(400.0)
    assert bench.engine.ledger.empty
    assert len(bench.all(ef.ReportSent)) == 1


def test_a_lost_rank_ends_its_own_part_only(bench: Bench) -> None:
    bench.take(b.started(), b.finished())
    bench.hear(C1, b.register())
    bench.hear(C2, b.register())
    bench.take(ev.NoticeFailed(agent=C2, detail="gone", is_dead=True))
    assert states(bench)["t"] == "transferring"
    assert states(bench)["t 1"] == "draining"


@pytest.mark.parametrize(("producing", "consuming"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 2)])
def test_every_rank_gets_what_it_is_owed_s6_l1(producing: int, consuming: int) -> None:
    world = World()
    producer = world.add_producer("P", ranks=producing)
    consumer = world.add_consumer("C", ranks=consuming)
    prefill, load = both_legs(producer, consumer)
    world.advance(0.1)
    producer.finish(prefill)
    world.advance(1.0)
    assert load.state == "received"
    assert prefill.state == "over"
    world.everything_ends()
