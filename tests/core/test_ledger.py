"""The ledger objects to what must never happen, and is empty when all has ended."""

import pytest

from kvflow.core.ledger import Ledger
from kvflow.errors import LocalProtocolError
from kvflow.ids import Rank, RequestId, TransferId, part_id

R, OTHER = RequestId("r"), RequestId("other")
PART = part_id(TransferId("t"), 0)
NOBODY: frozenset[object] = frozenset()


def test_a_block_has_one_live_load_s1() -> None:
    ledger = Ledger()
    ledger.reserve(R, ((1, 2), (1,)))
    with pytest.raises(LocalProtocolError, match="S1"):
        ledger.reserve(OTHER, ((3,), (1,)))
    ledger.reserve(OTHER, ((3,), (2,)))


def test_a_request_has_one_load_s1() -> None:
    ledger = Ledger()
    ledger.reserve(R, ((1,),))
    with pytest.raises(LocalProtocolError, match="S1"):
        ledger.reserve(R, ((2,),))


def test_blocks_are_not_given_back_while_a_rank_may_write_s2() -> None:
    ledger = Ledger()
    ledger.reserve(R, ((1,),))
    with pytest.raises(LocalProtocolError, match="S2"):
        ledger.give_back(R, frozenset({Rank(0, 0)}))
    assert ledger.holds(R)


def test_blocks_are_given_back_once_and_can_then_be_reserved_s5() -> None:
    ledger = Ledger()
    ledger.reserve(R, ((1,),))
    ledger.give_back(R, NOBODY)
    with pytest.raises(LocalProtocolError, match="S5"):
        ledger.give_back(R, NOBODY)
    ledger.reserve(OTHER, ((1,),))


def test_blocks_are_not_released_while_a_write_is_outstanding_s3() -> None:
    ledger = Ledger()
    ledger.pin(R, PART)
    ledger.open_write(PART, 1, R)
    with pytest.raises(LocalProtocolError, match="S3"):
        ledger.unpin(R, PART)
    ledger.close_write(PART)
    ledger.unpin(R, PART)
    assert ledger.empty


def test_a_prefill_is_pinned_and_unpinned_once_s3_s5() -> None:
    ledger = Ledger()
    ledger.pin(R, PART)
    with pytest.raises(LocalProtocolError, match="S3"):
        ledger.pin(R, PART)
    ledger.unpin(R, PART)
    with pytest.raises(LocalProtocolError, match="S5"):
        ledger.unpin(R, PART)


def test_a_write_is_opened_once_and_only_from_a_pinned_prefill_s4() -> None:
    ledger = Ledger()
    with pytest.raises(LocalProtocolError, match="S4"):
        ledger.open_write(PART, 1, R)
    ledger.pin(R, PART)
    ledger.open_write(PART, 1, R)
    with pytest.raises(LocalProtocolError, match="S4"):
        ledger.open_write(PART, 1, R)
    assert ledger.is_open(PART, 1)
    assert not ledger.is_open(PART, 2)


def test_a_write_that_is_not_open_cannot_be_closed_s4() -> None:
    with pytest.raises(LocalProtocolError, match="S4"):
        Ledger().close_write(PART)


def test_blocks_are_not_given_back_while_a_read_is_outstanding_s2() -> None:
    ledger = Ledger()
    ledger.reserve(R, ((1,),))
    for rank in (Rank(0, 0), Rank(0, 1)):
        ledger.open_read(R, rank)
    ledger.close_read(R, Rank(0, 0))
    with pytest.raises(LocalProtocolError, match="S2"):
        ledger.give_back(R, NOBODY)
    ledger.close_read(R, Rank(0, 1))
    ledger.give_back(R, NOBODY)
    assert ledger.empty


def test_a_read_needs_reserved_blocks_and_is_the_only_one_from_its_rank_s2() -> None:
    ledger = Ledger()
    with pytest.raises(LocalProtocolError, match="S2"):
        ledger.open_read(R, Rank(0, 0))
    ledger.reserve(R, ((1,),))
    ledger.open_read(R, Rank(0, 0))
    assert not ledger.empty
    with pytest.raises(LocalProtocolError, match="S2"):
        ledger.open_read(R, Rank(0, 0))
    with pytest.raises(LocalProtocolError, match="S2"):
        ledger.close_read(R, Rank(0, 1))


def test_what_is_still_being_read_is_not_asked_about_s8() -> None:
    ledger = Ledger()
    ledger.reserve(R, ((1,),))
    ledger.open_read(R, Rank(0, 0))
    with pytest.raises(LocalProtocolError, match="S8"):
        ledger.claim_fetched(R, Rank(0, 0))
    ledger.close_read(R, Rank(0, 0))
    ledger.claim_fetched(R, Rank(0, 0))
