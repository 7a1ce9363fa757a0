"""The rows of a load that reads: what it does in `expecting`, `reading` and `stopping`.

Rules: one READ at a time from each producer rank; what was read counts only when its producer has
said, after the READ had ended, that it still held it (S8); blocks go back to vLLM when our own
READs have ended, and for that nobody needs to be asked.

The idea: a READ harms nobody, so it may begin before anybody has agreed to it, on the router's word
of a finished prefill. Whether it was right is asked afterwards. A prefill stays pinned from its end
until it is let go once, so if it is still held when its READ is over, it was held all the time.
"""

from kvflow.core.consumer import (
    ConsumerRecord,
    FromRank,
    Outcome,
    Reads,
    completes,
    completes_not,
    completes_wrongly,
    is_done_already,
)
from kvflow.core.consumer_actions import (
    cancel_unsettled,
    deadline_key,
    end,
    register,
    register_with,
    resend_key,
    settle,
)
from kvflow.core.effects import PostRead, StopRead
from kvflow.core.events import ReadDone, ReadFailed, ReadStopped
from kvflow.core.notices import Fetched, Offer
from kvflow.core.reasons import Reason, Standing
from kvflow.core.turn import PeerGone, PeerMet, Turn
from kvflow.ids import Rank

C = ConsumerRecord
ReadEnded = ReadDone | ReadFailed | ReadStopped

# -- guards --------------------------------------------------------------------------------------


def _of(record: C) -> Reads:
    assert record.reads is not None
    return record.reads


def is_written(record: C, event: object, turn: Turn) -> bool:
    return record.reads is None


def is_read_on_word(record: C, event: object, turn: Turn) -> bool:
    """The producer has to say first what there is to be read."""
    return record.reads is not None and record.reads.offer is None


def is_read_at_once(record: C, event: object, turn: Turn) -> bool:
    return record.reads is not None and record.reads.offer is not None


def reads_nothing(record: C, event: object, turn: Turn) -> bool:
    return not _of(record).open


def reads_something(record: C, event: object, turn: Turn) -> bool:
    return not reads_nothing(record, event, turn)


def is_missed_and_reads_nothing(record: C, event: FromRank, turn: Turn) -> bool:
    return not is_done_already(record, event, turn) and reads_nothing(record, event, turn)


def is_missed_and_reads_something(record: C, event: FromRank, turn: Turn) -> bool:
    return not is_done_already(record, event, turn) and reads_something(record, event, turn)


def confirms(record: C, event: FromRank) -> bool:
    """This rank was told that its part had been read, and says which prefill it has held."""
    reads = _of(record)
    return event.rank in reads.fetched and reads.sources[event.rank].prefill == event.prefill


def confirms_nothing(record: C, event: FromRank, turn: Turn) -> bool:
    return not confirms(record, event)


def confirms_the_last(record: C, event: FromRank, turn: Turn) -> bool:
    return confirms(record, event) and completes(record, event, turn)


def confirms_what_is_wrong(record: C, event: FromRank, turn: Turn) -> bool:
    """The ranks have held the KV of different prefills, or of another prompt."""
    return confirms(record, event) and completes_wrongly(record, event, turn)


def confirms_one(record: C, event: FromRank, turn: Turn) -> bool:
    return confirms(record, event) and completes_not(record, event, turn)


def _is_said(record: C, rank: Rank) -> bool:
    """Whether the producer has said that there is what is read, or was read, from this rank."""
    reads = _of(record)
    return reads.sources[rank] == reads.said.get(rank)


def may_be_read_again(record: C, event: ReadFailed, turn: Turn) -> bool:
    """What only a router has told of is no failure: there will be a word of the producer's."""
    wanted = not event.final and record.retries < turn.timings.retries_max
    return wanted or not _is_said(record, event.rank)


def _others_are_read(record: C, event: ReadEnded) -> bool:
    return bool(_of(record).open - {event.rank})


def fails_alone(record: C, event: ReadFailed, turn: Turn) -> bool:
    return not may_be_read_again(record, event, turn) and not _others_are_read(record, event)


def fails_while_others_are_read(record: C, event: ReadFailed, turn: Turn) -> bool:
    return not may_be_read_again(record, event, turn) and _others_are_read(record, event)


def was_the_last(record: C, event: ReadEnded, turn: Turn) -> bool:
    return not _others_are_read(record, event)


def was_not_the_last(record: C, event: ReadEnded, turn: Turn) -> bool:
    return _others_are_read(record, event)


# -- small steps ---------------------------------------------------------------------------------


def _read(record: C, rank: Rank, offer: Offer, turn: Turn) -> None:
    reads = _of(record)
    turn.ledger.open_read(record.request_id, rank)
    reads.sources[rank] = offer
    reads.open.add(rank)
    reads.complete.discard(rank)
    reads.fetched.discard(rank)
    post = PostRead(
        request_id=record.request_id,
        rank=rank,
        agent=record.agents[rank],
        source=offer.blocks,
        destination=record.blocks,
        starts=record.starts,
        tokens=record.tokens,
    )
    turn.effects.append(post)


def _stop(record: C, rank: Rank, turn: Turn) -> None:
    turn.effects.append(StopRead(request_id=record.request_id, rank=rank))


def _closed(record: C, event: ReadEnded, turn: Turn) -> None:
    turn.ledger.close_read(record.request_id, event.rank)
    _of(record).open.discard(event.rank)


def _go_on(record: C, rank: Rank, turn: Turn) -> None:
    """What this rank's part lacks next: to be read, to be read again, or to be confirmed."""
    reads = _of(record)
    said, source = reads.said.get(rank), reads.sources.get(rank)
    if said is None:
        return
    if rank in reads.open:
        if said != source:
            _stop(record, rank, turn)
    elif said != source or rank not in reads.complete:
        _read(record, rank, said, turn)
    else:
        reads.fetched.add(rank)
        _tell_fetched(record, rank, turn)
        _insist(record, turn)


def _tell_fetched(record: C, rank: Rank, turn: Turn) -> None:
    turn.ledger.claim_fetched(record.request_id, rank)
    fetched = Fetched(transfer_id=record.transfer_id, attempt=record.attempt)
    turn.send(record.agents[rank], fetched)


def _unanswered(record: C) -> tuple[set[Rank], set[Rank]]:
    """Ranks that have not answered the registration, and those that have not confirmed."""
    return record.agents.keys() - record.answered, _of(record).fetched - record.outcomes.keys()


def _insist(record: C, turn: Turn) -> None:
    if any(_unanswered(record)):
        turn.arm(resend_key(record), turn.timings.register_resend_s)


def _leave(record: C, turn: Turn, reason: Reason | None) -> None:
    """Stop our READs; tell the ranks once that nothing is wanted, their leases do the rest."""
    record.reason = reason
    for rank in sorted(_of(record).open):
        _stop(record, rank, turn)
    cancel_unsettled(record, turn)
    turn.deadlines.cancel(resend_key(record))
    turn.arm(deadline_key(record), turn.timings.write_drain_s)


def _give_up(record: C, turn: Turn, reason: Reason | None) -> None:
    _leave(record, turn, reason)
    if not _of(record).open:
        end(record, turn, reason)


# -- actions -------------------------------------------------------------------------------------


def register_and_read(record: C, event: PeerMet, turn: Turn) -> None:
    register(record, event, turn)
    offer = _of(record).offer
    assert offer is not None
    for rank in sorted(record.agents):
        _read(record, rank, offer, turn)


def note_word(record: C, event: FromRank, turn: Turn) -> None:
    """It says that there is something to be read, but what it said of it was lost: ask again."""
    record.answered.add(event.rank)
    if event.standing is Standing.READABLE and event.rank not in _of(record).said:
        register_with(record, event.rank, turn, again=True)


def take_offer(record: C, event: FromRank, turn: Turn) -> None:
    record.answered.add(event.rank)
    assert event.offer is not None
    _of(record).said[event.rank] = event.offer
    if not is_done_already(record, event, turn):
        _go_on(record, event.rank, turn)


def note_read(record: C, event: ReadDone, turn: Turn) -> None:
    _closed(record, event, turn)
    record.bytes += event.bytes
    record.runs += event.runs
    _of(record).complete.add(event.rank)
    _go_on(record, event.rank, turn)


def note_stopped(record: C, event: ReadStopped, turn: Turn) -> None:
    _closed(record, event, turn)
    _go_on(record, event.rank, turn)


def read_again(record: C, event: ReadFailed, turn: Turn) -> None:
    """Nothing of it can land any more. Before the producer has spoken, that is waited for."""
    _closed(record, event, turn)
    record.retries += _is_said(record, event.rank)
    record.detail = event.detail
    _go_on(record, event.rank, turn)


def fail_read(record: C, event: ReadFailed, turn: Turn) -> None:
    _closed(record, event, turn)
    record.detail = event.detail
    _give_up(record, turn, Reason.READ_FAILED)


def resend(record: C, event: object, turn: Turn) -> None:
    silent, unconfirmed = _unanswered(record)
    for rank in sorted(silent):
        register_with(record, rank, turn, again=True)
    for rank in sorted(unconfirmed):
        _tell_fetched(record, rank, turn)
    _insist(record, turn)


def fail_refused(record: C, event: FromRank, turn: Turn) -> None:
    settle(record, event.rank, Outcome.FAILED)
    _give_up(record, turn, event.reason or Reason.FORGOTTEN)


def fail_lost(record: C, event: FromRank, turn: Turn) -> None:
    record.outcomes[event.rank] = Outcome.LOST
    _give_up(record, turn, Reason.PEER_LOST)


def fail_aborted(record: C, event: object, turn: Turn) -> None:
    _give_up(record, turn, Reason.ABORTED)


def fail_rival(record: C, event: object, turn: Turn) -> None:
    _give_up(record, turn, Reason.AMBIGUOUS)


def fail_deadline(record: C, event: object, turn: Turn) -> None:
    _give_up(record, turn, Reason.DEADLINE)


def fail_closing(record: C, event: object, turn: Turn) -> None:
    _give_up(record, turn, Reason.SHUTDOWN)


def note_ended(record: C, event: ReadEnded, turn: Turn) -> None:
    _closed(record, event, turn)


def fail_stopped(record: C, event: ReadEnded, turn: Turn) -> None:
    """Our last READ has ended: now, and not before, the blocks go back."""
    _closed(record, event, turn)
    end(record, turn, record.reason)


def tear_down(record: C, event: object, turn: Turn) -> None:
    """READs that neither end nor fail: make their peers unreachable, so that they must."""
    for rank in sorted(_of(record).open):
        gone = PeerGone(agent=record.agents[rank], detail="a read from it did not end")
        turn.follow_ups.append(gone)
    turn.arm(deadline_key(record), turn.timings.write_drain_s)
