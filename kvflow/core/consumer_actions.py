"""What the consumer's rows do. The machine is described in `kvflow.core.consumer`."""

from kvflow.core.consumer import (
    NAME,
    RESEND,
    ConsumerRecord,
    FromRank,
    Outcome,
    Reads,
    is_of_our_prompt,
)
from kvflow.core.effects import ReportReceived
from kvflow.core.events import BlocksAllocated, LoadRefused, ReleaseWanted
from kvflow.core.notices import Cancel, Offer, Register
from kvflow.core.reasons import Reason, Standing
from kvflow.core.turn import PeerGone, PeerMet, Turn, Wanted
from kvflow.ids import Rank, RequestId

C = ConsumerRecord

# -- small steps ---------------------------------------------------------------------------------


def deadline_key(record: C) -> tuple[str, RequestId]:
    return (NAME, record.request_id)


def resend_key(record: C) -> tuple[str, RequestId]:
    return (RESEND, record.request_id)


def _start(record: C, event: BlocksAllocated | LoadRefused | ReleaseWanted, turn: Turn) -> None:
    """A new attempt: nothing of an earlier one counts."""
    _let_go(record, turn)
    record.transfer_id = event.transfer_id
    record.attempt = event.attempt
    record.born = turn.now
    record.retries = 0
    record.fence_s = 0.0
    record.reason = None
    record.detail = ""
    record.blocks = ()
    record.starts = ()
    record.keep = False
    record.prefill = ""
    record.reads = None
    record.bytes = record.runs = 0
    record.spent_ms.clear()
    turn.deadlines.cancel(resend_key(record))
    for memory in (record.answered, record.blind, record.writing):
        memory.clear()
    for by_rank in (record.agents, record.outcomes, record.prefills):
        by_rank.clear()


def _want(record: C, event: BlocksAllocated | ReleaseWanted, turn: Turn) -> None:
    record.address = event.address
    record.engine_id = event.engine_id
    _meet(record, turn)


def _meet(record: C, turn: Turn) -> None:
    turn.arm(deadline_key(record), turn.timings.meet_deadline_s)
    turn.follow_ups.append(Wanted(address=record.address, request_id=record.request_id))


def register_with(record: C, rank: Rank, turn: Turn, *, again: bool) -> None:
    agent = record.agents[rank]
    write_until_s = None if record.reads else turn.write_until(agent)
    if write_until_s is None and not record.reads:
        record.blind.add(rank)
    else:
        record.blind.discard(rank)
    register = Register(
        transfer_id=record.transfer_id,
        attempt=record.attempt,
        blocks=record.blocks,
        starts=record.starts,
        tokens=record.tokens,
        lease_s=turn.timings.lease_s,
        write_until_s=write_until_s,
        keep=record.keep,
        prefill=record.prefill,
        reads=record.reads is not None,
    )
    turn.send(agent, register)
    if again:
        turn.tally.resent += 1
    else:
        turn.tally.sent += 1


def cancel_unsettled(record: C, turn: Turn) -> None:
    for rank in sorted(record.unsettled):
        cancel = Cancel(transfer_id=record.transfer_id, attempt=record.attempt)
        turn.send(record.agents[rank], cancel)


def settle(record: C, rank: Rank, outcome: Outcome) -> None:
    record.answered.add(rank)
    if record.outcomes.get(rank) is not Outcome.DONE:
        record.outcomes[rank] = outcome


def _note_kept(record: C, event: FromRank, turn: Turn) -> None:
    if event.kept_s > 0:
        record.kept[record.agents[event.rank]] = turn.now + event.kept_s


def _let_go(record: C, turn: Turn) -> None:
    """Tell once, without insisting, whoever keeps blocks for a load that will not come."""
    for agent, until in sorted(record.kept.items()):
        if until > turn.now:
            turn.send(agent, Cancel(transfer_id=record.transfer_id, attempt=record.attempt))
    record.kept.clear()


def end(record: C, turn: Turn, reason: Reason | None, *, fenced: bool = False) -> None:
    """Give the blocks back, tell vLLM, become a tombstone. Into what we read nobody writes."""
    if reason is not None:
        _let_go(record, turn)
    lost = frozenset() if fenced else record.lost
    writers = frozenset() if record.reads else record.unsettled | lost
    turn.ledger.give_back(record.request_id, writers)
    record.reason = reason
    turn.effects.append(ReportReceived(request_id=record.request_id, reason=reason))
    _bury(record, turn)


def _bury(record: C, turn: Turn) -> None:
    turn.deadlines.cancel(resend_key(record))
    kept_s = max(record.kept.values(), default=turn.now) - turn.now
    turn.arm(deadline_key(record), max(turn.timings.tombstone_s, kept_s))


def _give_up(record: C, turn: Turn, reason: Reason | None) -> None:
    """Ask every rank that may write to stop, and insist."""
    record.reason = reason
    if record.state != "draining":
        record.gave_up_at = turn.now
    cancel_unsettled(record, turn)
    turn.arm(resend_key(record), turn.timings.cancel_resend_s)
    turn.arm(deadline_key(record), turn.timings.cancel_deadline_s)


# -- actions: vLLM -------------------------------------------------------------------------------


def reserve(record: C, event: BlocksAllocated, turn: Turn) -> None:
    turn.ledger.reserve(event.request_id, event.blocks)
    _start(record, event, turn)
    record.blocks = event.blocks
    record.starts = event.starts
    record.tokens = event.tokens
    record.prompt = event.prompt
    record.keep = event.keep
    record.reads = Reads(offer=_usable(event)) if event.reads else None
    _want(record, event, turn)


def _usable(event: BlocksAllocated) -> Offer | None:
    """What the router says of a finished prefill, if that is what is wanted here."""
    offer = event.offer
    fits = offer is not None and offer.tokens >= event.tokens
    return offer if offer and fits and len(offer.blocks) == len(event.blocks) else None


def reserve_again(record: C, event: BlocksAllocated, turn: Turn) -> None:
    """What is kept stays so: it is what is asked for."""
    prefill = next(iter(record.prefills.values()))
    kept, record.kept = record.kept, {}
    reserve(record, event, turn)
    record.prefill, record.kept = prefill, kept


def refuse_again(record: C, event: BlocksAllocated, turn: Turn) -> None:
    turn.ledger.reserve(event.request_id, ())
    _start(record, event, turn)
    record.detail = "the producer does not keep it"
    end(record, turn, Reason.FORGOTTEN)


def want_nothing_more(record: C, event: object, turn: Turn) -> None:
    """Whoever keeps its blocks is told until it answers. Ours are vLLM's again."""
    record.blocks = ()
    record.agents.clear()
    record.outcomes.clear()
    _meet(record, turn)


def let_go(record: C, event: object, turn: Turn) -> None:
    _let_go(record, turn)


def refuse_load(record: C, event: LoadRefused, turn: Turn) -> None:
    turn.ledger.reserve(event.request_id, ())
    _start(record, event, turn)
    record.detail = event.detail
    end(record, turn, event.reason)


def want_release(record: C, event: ReleaseWanted, turn: Turn) -> None:
    _start(record, event, turn)
    record.reason = Reason.RELEASED
    _want(record, event, turn)


def fail_unregistered(record: C, event: object, turn: Turn) -> None:
    """Nobody was told of the blocks, so nobody can write."""
    end(record, turn, Reason.ABORTED)


def give_up_aborted(record: C, event: object, turn: Turn) -> None:
    _give_up(record, turn, Reason.ABORTED)


def fail_rival(record: C, event: object, turn: Turn) -> None:
    end(record, turn, Reason.AMBIGUOUS)


def give_up_rival(record: C, event: object, turn: Turn) -> None:
    _give_up(record, turn, Reason.AMBIGUOUS)


# -- actions: peer -------------------------------------------------------------------------------


def register(record: C, event: PeerMet, turn: Turn) -> None:
    record.agents.update(event.agents)
    for rank in sorted(record.agents):
        register_with(record, rank, turn, again=False)
    turn.arm(resend_key(record), turn.timings.register_resend_s)
    rest_s = record.born + turn.timings.load_deadline_s - turn.now
    turn.arm(deadline_key(record), max(rest_s, 0.0))


def tell_release(record: C, event: PeerMet, turn: Turn) -> None:
    told = {rank: agent for rank, agent in event.agents.items() if agent in record.kept}
    record.agents.update(told or event.agents)
    record.kept.clear()
    _give_up(record, turn, record.reason)


def fail_unreachable(record: C, event: PeerMet, turn: Turn) -> None:
    record.detail = event.refusal or ""
    end(record, turn, Reason.INCOMPATIBLE)


def end_release(record: C, event: object, turn: Turn) -> None:
    _bury(record, turn)


def note_released(record: C, event: FromRank, turn: Turn) -> None:
    settle(record, event.rank, Outcome.FAILED)
    _bury(record, turn)


def note_settled(record: C, event: FromRank, turn: Turn) -> None:
    _note_kept(record, event, turn)
    settle(record, event.rank, Outcome.FAILED)


def _lose(record: C, event: FromRank, turn: Turn) -> None:
    """A process that is only silent may be stopped in the middle of a slice, and go on later."""
    record.outcomes[event.rank] = Outcome.LOST
    timings = turn.timings
    fence_s = timings.fence_s if event.is_dead else timings.fence_silent_s
    record.fence_s = max(record.fence_s, fence_s)


def lose(record: C, event: FromRank, turn: Turn) -> None:
    _lose(record, event, turn)
    _give_up(record, turn, record.reason or Reason.PEER_LOST)


def lose_and_fence(record: C, event: FromRank, turn: Turn) -> None:
    """What may still write has been torn down: wait until it must have stopped."""
    _lose(record, event, turn)
    record.reason = record.reason or Reason.PEER_LOST
    turn.deadlines.cancel(resend_key(record))
    turn.arm(deadline_key(record), record.fence_s)


# -- actions: what ranks say ---------------------------------------------------------------------


def note_answer(record: C, event: FromRank, turn: Turn) -> None:
    record.answered.add(event.rank)
    if event.standing is Standing.TRANSFERRING:
        record.writing.add(event.rank)
    if event.rank in record.blind:
        register_with(record, event.rank, turn, again=True)


def note_stopping(record: C, event: FromRank, turn: Turn) -> None:
    """It lives and is at it: wait on, though not for ever."""
    if event.standing is Standing.STOPPING:
        rest_s = record.gave_up_at + turn.timings.stop_deadline_s - turn.now
        turn.arm(deadline_key(record), min(turn.timings.cancel_deadline_s, max(rest_s, 0.0)))


def note_last_answer(record: C, event: FromRank, turn: Turn) -> None:
    note_answer(record, event, turn)
    turn.deadlines.cancel(resend_key(record))


def note_done(record: C, event: FromRank, turn: Turn) -> None:
    settle(record, event.rank, Outcome.DONE)
    _note_kept(record, event, turn)
    record.prefills[event.rank] = event.prefill


def note_done_last_answer(record: C, event: FromRank, turn: Turn) -> None:
    note_done(record, event, turn)
    turn.deadlines.cancel(resend_key(record))


def receive(record: C, event: FromRank, turn: Turn) -> None:
    note_done(record, event, turn)
    end(record, turn, None)


def fail_wrong(record: C, event: FromRank, turn: Turn) -> None:
    is_ours = is_of_our_prompt(record, event)
    record.detail = "the KV is of two prefills" if is_ours else "the KV is another prompt's"
    note_done(record, event, turn)
    end(record, turn, Reason.AMBIGUOUS)


def fail(record: C, event: FromRank, turn: Turn) -> None:
    settle(record, event.rank, Outcome.FAILED)
    end(record, turn, event.reason or Reason.FORGOTTEN)


def retry(record: C, event: FromRank, turn: Turn) -> None:
    """The edge back: the same blocks, a new attempt, within the same deadline."""
    record.attempt += 1
    record.retries += 1
    record.answered.discard(event.rank)
    record.writing.discard(event.rank)
    register_with(record, event.rank, turn, again=False)
    turn.arm(resend_key(record), turn.timings.register_resend_s)


def give_up_failed(record: C, event: FromRank, turn: Turn) -> None:
    settle(record, event.rank, Outcome.FAILED)
    _give_up(record, turn, event.reason or Reason.FORGOTTEN)
    if event.reason is Reason.WRITE_FAILED:
        # It keeps its KV for a retry, which will not come.
        cancel = Cancel(transfer_id=record.transfer_id, attempt=record.attempt)
        turn.send(record.agents[event.rank], cancel)


def fail_drained(record: C, event: FromRank, turn: Turn) -> None:
    _note_kept(record, event, turn)
    settle(record, event.rank, Outcome.FAILED)
    end(record, turn, record.reason)


# -- actions: time -------------------------------------------------------------------------------


def resend_register(record: C, event: object, turn: Turn) -> None:
    for rank in sorted(record.agents.keys() - record.answered):
        register_with(record, rank, turn, again=True)
    turn.arm(resend_key(record), turn.timings.register_resend_s)


def resend_cancel(record: C, event: object, turn: Turn) -> None:
    cancel_unsettled(record, turn)
    turn.arm(resend_key(record), turn.timings.cancel_resend_s)


def fail_meeting(record: C, event: object, turn: Turn) -> None:
    end(record, turn, Reason.UNREACHABLE)


def give_up_deadline(record: C, event: object, turn: Turn) -> None:
    _give_up(record, turn, Reason.DEADLINE)


def lose_silent(record: C, event: object, turn: Turn) -> None:
    """A peer that does not answer a cancel for so long is treated as lost."""
    for rank in sorted(record.unsettled):
        gone = PeerGone(agent=record.agents[rank], detail="did not answer a cancel in time")
        turn.follow_ups.append(gone)
    turn.arm(deadline_key(record), turn.timings.cancel_deadline_s)


def fail_fenced(record: C, event: object, turn: Turn) -> None:
    end(record, turn, record.reason, fenced=True)


def fail_closing(record: C, event: object, turn: Turn) -> None:
    end(record, turn, Reason.SHUTDOWN)


def give_up_closing(record: C, event: object, turn: Turn) -> None:
    _give_up(record, turn, Reason.SHUTDOWN)
