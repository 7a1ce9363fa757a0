"""A regression: one request that named a wrong engine id failed all loads of a healthy producer."""

from kvflow.core import Reason
from kvflow.core import events as ev
from kvflow.core.effects import DropPeer, ReportReceived
from kvflow.ids import AgentName, Incarnation, RequestId, TransferId
from kvflow.testing import bench as b
from kvflow.testing import ways
from kvflow.testing.bench import P0, P1, Bench

OTHER = b.allocated("other", 6, TransferId("o"), ((9,),), engine_id="engine-2")


def state(bench: Bench, request: str) -> str:
    return bench.engine.records.consumers[RequestId(request)].state


def test_a_wrong_engine_id_fails_its_own_load_and_no_other_f12() -> None:
    bench = Bench()
    ways.c_registered(bench)
    bench.take(OTHER)
    assert state(bench, "c") == "registered", "the producer is asked who it is, and not dropped"
    bench.meet()
    assert state(bench, "c") == "registered"
    assert state(bench, "other") == "failed"
    reports = bench.all(ReportReceived)
    assert [(each.request_id, each.reason) for each in reports] == [("other", Reason.INCOMPATIBLE)]
    assert not bench.all(DropPeer)


def test_an_engine_that_really_was_replaced_loses_its_old_loads_at_once_f11() -> None:
    bench = Bench()
    ways.c_registered(bench)
    bench.take(OTHER)
    bench.take(
        ev.MeetingSucceeded(
            address=b.ADDRESS,
            engine_id="engine-2",
            incarnation=Incarnation("i-2"),
            agents=dict(zip(b.RANKS, (AgentName("Q0"), AgentName("Q1")), strict=True)),
        )
    )
    assert state(bench, "c") == "fencing"
    assert state(bench, "other") == "registering"
    assert {each.agent for each in bench.all(DropPeer)} == {P0, P1}
