"""Arrivals, prompts, and what the two legs of a request say to which connector."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvflow.bench import serve_connectors, serve_load
from kvflow.bench.serve_connectors import PULL, PUSH, UPSTREAM_PULL, UPSTREAM_PUSH, Legs
from kvflow.bench.serve_load import Load, Sent, arrivals, difference, prompts, record, run_load
from kvflow.demo.engines import Json
from kvflow.demo.requests import Completion, Dispatch, Endpoints, JsonObject

ENDPOINTS = Endpoints(
    producer_url="http://producer",
    consumer_url="http://consumer",
    side_channel_host="10.0.0.1",
    side_channel_port=5600,
)
ANSWER: dict[str, Json] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "the-producer",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "cmpl-1",
    "tp_size": 2,
    "pp_size": 1,
}


def test_the_same_seed_gives_the_same_arrivals() -> None:
    times = arrivals(50, 2.0, "1 1 2.0 512")
    assert times == arrivals(50, 2.0, "1 1 2.0 512")
    assert times != arrivals(50, 2.0, "1 2 2.0 512")
    assert times[0] == 0
    assert all(one < other for one, other in pairwise(times))


@pytest.mark.parametrize("per_s", [0.5, 4.0])
def test_gaps_between_arrivals_are_exponential(per_s: float) -> None:
    times = arrivals(4001, per_s, "a seed")
    gaps = [other - one for one, other in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / per_s, rel=0.1)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_prompts_depend_on_the_seed_alone_and_none_is_like_another() -> None:
    made = prompts(20, 64, "1")
    assert made == prompts(20, 64, "1")
    assert len(set(made) | set(prompts(20, 64, "2"))) == 40
    assert {len(prompt) for prompt in made} == {64}


class FakeClient:
    """Answers like two engines, and writes down what it was asked."""

    endpoints = ENDPOINTS

    def __init__(self, *, prefill_error: str | None = None) -> None:
        self.asked: list[tuple[str, JsonObject | None, str | None, int]] = []
        self.up_together = 0
        self._up = 0
        self._prefill_error = prefill_error

    async def complete(
        self,
        url: str,
        prompt: Sequence[int],
        *,
        tokens: int,
        params: JsonObject | None = None,
        request_id: str | None = None,
        stream: bool = False,
        began: float | None = None,
    ) -> Completion:
        self.asked.append((url, params, request_id, tokens))
        self._up += 1
        self.up_together = max(self.up_together, self._up)
        await asyncio.sleep(0)
        self._up -= 1
        if url == ENDPOINTS.producer_url:
            return Completion(
                token_ids=(1,), error=self._prefill_error, total_s=0.2, kv_transfer_params=ANSWER
            )
        return Completion(token_ids=(1, 2, 3), first_token_s=0.25, last_token_s=0.31, total_s=0.32)


def sent_by(legs: Legs, dispatch: Dispatch, client: FakeClient) -> Sent:
    sending = serve_load.send(
        client,  # type: ignore[arg-type]
        legs,
        (5, 6),
        dispatch=dispatch,
        tokens=3,
    )
    return asyncio.run(sending)


@pytest.mark.parametrize("dispatch", list(Dispatch), ids=lambda each: each.value)
def test_kvflows_legs_share_a_transfer_id(dispatch: Dispatch) -> None:
    client = FakeClient()
    sent = sent_by(Legs(connector=PUSH, endpoints=ENDPOINTS), dispatch, client)
    prefill, decode = client.asked
    assert prefill == (
        ENDPOINTS.producer_url,
        {"do_remote_decode": True, "transfer_id": sent.name},
        None,
        1,
    )
    assert decode[0] == ENDPOINTS.consumer_url
    assert decode[2:] == (None, 3)
    assert decode[1] is not None
    assert decode[1]["transfer_id"] == sent.name
    assert (decode[1]["remote_host"], decode[1]["remote_port"]) == ("10.0.0.1", 5600)
    assert ("tp_size" in decode[1]) is (dispatch is Dispatch.SEQUENTIAL)
    assert client.up_together == (2 if dispatch is Dispatch.CONCURRENT else 1)


def test_upstreams_decode_leg_carries_the_answer_of_its_prefill_leg() -> None:
    client = FakeClient()
    sent = sent_by(Legs(connector=UPSTREAM_PULL, endpoints=ENDPOINTS), Dispatch.SEQUENTIAL, client)
    prefill, decode = client.asked
    assert prefill[1] is not None
    assert prefill[1]["do_remote_decode"] is True
    assert prefill[2] == decode[2] == sent.name
    assert decode[1] == ANSWER


def test_upstreams_concurrent_decode_leg_knows_the_producer_from_a_warm_up() -> None:
    client = FakeClient()
    legs = Legs(connector=UPSTREAM_PUSH, endpoints=ENDPOINTS).knowing(ANSWER)
    sent = sent_by(legs, Dispatch.CONCURRENT, client)
    prefill, decode = client.asked
    assert prefill[2] == decode[2] == sent.name
    assert decode[1] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": sent.name,
        "remote_engine_id": "the-producer",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 1,
    }


def test_a_decode_leg_is_not_sent_after_a_prefill_leg_that_failed() -> None:
    client = FakeClient(prefill_error="HTTP 500: no")
    sent = sent_by(Legs(connector=PULL, endpoints=ENDPOINTS), Dispatch.SEQUENTIAL, client)
    assert len(client.asked) == 1
    assert sent.error == "prefill leg: HTTP 500: no"


def test_times_of_a_request_are_worked_out_from_its_answers() -> None:
    client = FakeClient()
    sent = sent_by(Legs(connector=PUSH, endpoints=ENDPOINTS), Dispatch.CONCURRENT, client)
    written = record(4, sent, (5, 6), (1, 2, 3), arrival_s=1.5, late_s=0.002)
    assert (written.number, written.prompt_tokens, written.output_tokens) == (4, 2, 3)
    assert written.ttft_ms == pytest.approx(250)
    assert written.tpot_ms == pytest.approx(30)
    assert written.handover_ms == pytest.approx(50)
    assert written.prefill_ms == pytest.approx(200)
    assert written.late_ms == pytest.approx(2)
    assert written.is_right
    assert not record(4, sent, (5, 6), (1, 2, 4), arrival_s=0, late_s=0).is_right


def test_a_load_sends_every_prompt_and_compares_its_own_tokens() -> None:
    asked = prompts(3, 8, "1")
    load = Load(
        rate=1000.0,
        length=8,
        dispatch=Dispatch.CONCURRENT,
        prompts=asked,
        due=arrivals(3, 1000.0, "1"),
        expected={asked[0]: (1, 2, 3), asked[1]: (1, 2), asked[2]: (9, 2, 3)},
        tokens=3,
    )
    legs = Legs(connector=PUSH, endpoints=ENDPOINTS)
    done = asyncio.run(run_load(FakeClient(), legs, load))  # type: ignore[arg-type]
    assert [each.number for each in done] == [1, 2, 3]
    assert [each.mismatch for each in done] == [
        None,
        "3 tokens, and 2 in the monolithic run",
        "token 1 of 3 is 1, and 9 in the monolithic run",
    ]
    assert len({each.name for each in done}) == 3


def test_a_difference_names_the_first_token() -> None:
    assert difference((1, 2), (1, 2)) is None
    assert difference((1, 3), (1, 2)) == "token 2 of 2 is 3, and 2 in the monolithic run"
    assert difference((), (1,)) == "0 tokens, and 1 in the monolithic run"


def known_settings(monkeypatch: pytest.MonkeyPatch, **known: tuple[str, ...]) -> None:
    """Lets kvflow have these settings, with these values, and no other."""
    from kvflow.errors import ConfigurationError

    def parse(extra_config: JsonObject) -> None:
        for key, value in extra_config.items():
            if key not in known:
                raise ConfigurationError(key, value, "one of the keys a, b")
            if value not in known[key]:
                raise ConfigurationError(key, value, " or ".join(known[key]))

    monkeypatch.setattr(serve_connectors.settings, "parse", parse)


def test_connectors_whose_settings_are_unknown_are_left_out_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known_settings(monkeypatch)
    selection = serve_connectors.select(serve_connectors.KEYS)
    assert [each.key for each in selection.connectors] == [
        "kvflow-push",
        "upstream-push",
        "upstream-pull",
    ]
    assert selection.connectors[0].extra_config == {}
    assert selection.left_out == (
        "kvflow streamed: this version has no setting `stream`; left out",
        "kvflow pull: this version has no setting `mode`; left out",
    )


def test_with_their_settings_known_all_connectors_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known_settings(monkeypatch, stream=("on", "off"), mode=("push", "pull"))
    selection = serve_connectors.select(serve_connectors.KEYS, sequential_too=True)
    assert selection.left_out == ()
    assert [each.key for each in selection.connectors] == list(serve_connectors.KEYS)
    assert selection.connectors[1].extra_config == {"stream": "off"}
    orders = {each.key: len(each.dispatches) for each in selection.connectors}
    assert orders == {
        "kvflow-streamed": 2,
        "kvflow-push": 2,
        "kvflow-pull": 1,
        "upstream-push": 2,
        "upstream-pull": 1,
    }


def test_a_setting_without_the_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known_settings(monkeypatch, stream=("on", "off"), mode=("push",))
    selection = serve_connectors.select(["kvflow-pull"])
    assert selection.left_out == (
        "kvflow pull: this version's setting `mode` is not 'pull' but push; left out",
    )
