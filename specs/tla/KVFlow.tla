------------------------------- MODULE KVFlow -------------------------------
(***************************************************************************)
(* kvflow's protocol (specs/protocol.md) between one consumer worker and   *)
(* the ranks of one producer engine.                                       *)
(*                                                                         *)
(* The consumer makes load after load into ONE place in its memory (one    *)
(* part of it per rank and slice), so whatever is written too late is seen *)
(* in somebody else's blocks.  Each load is of some transfer.  Attempts    *)
(* are numbered through all loads (decision 0001): load a has 2a - 1 and,  *)
(* for a retry after a failed write, 2a.                                   *)
(*                                                                         *)
(* What is left out, and why that is sound, is in README.md beside this.   *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
    Ranks,        \* producer ranks, all expected by the consumer
    Transfers,    \* transfer ids
    First,        \* the one that load 1 is of
    MaxLoad,      \* loads of the consumer
    MaxPrefill,   \* prefills per transfer id; more than one: the id is used again
    MaxFaults,    \* how many of the counted faults may happen
    Slices,       \* slices that a rank owes
    Faults,       \* which of those below may happen
    Pauses,       \* whether permissions may expire between two renewals
    Broken        \* "none", or one of the mistakes in Mistakes

Counted == {"lose", "fail", "abort", "crash", "drop"}
    \* lose    the consumer takes the producer engine for lost
    \* fail    a slice fails
    \* abort   vLLM aborts a prefill
    \* crash   a producer rank crashes, and the engine may come back
    \* drop    a producer rank takes the consumer for lost, and forgets it
Uncounted == {"giveup", "expire", "forget", "renew", "retry", "keep"}
    \* giveup  the consumer aborts, or the deadline of a load passes
    \* expire  a producer's lease or deadline ends
    \* forget  tombstones are forgotten
    \* renew   renewals are sent, and answered
    \* retry   after a failed write the producer keeps the KV, and the consumer registers once more
    \* keep    after a complete write it may keep it, and a request that was preempted loads again

Mistakes == {
    "none",
    "done_counted",             \* DONE is counted, not collected as a set of ranks
    "freed_before_cancelled",   \* blocks given back before every rank has settled
    "write_not_rechecked",      \* a slice is posted though the record is not live any more
    "fence_skipped",            \* blocks given back as soon as a peer is lost
    "stale_register_accepted",  \* a registration that was settled is put on record again
    "prefills_mixed",           \* the ranks may have written two prefills of one id
    "floor_dropped",            \* a consumer's floor is forgotten with its peer record
    "any_prefill_again",        \* a preempted request may get the KV of another prefill
    "silent_rank_awaited"}      \* a rank that does not answer a cancel is awaited for ever

ASSUME /\ First \in Transfers
       /\ Faults \subseteq Counted \union Uncounted
       /\ Pauses \in BOOLEAN
       /\ Broken \in Mistakes
       /\ {MaxLoad, MaxPrefill, Slices} \subseteq Nat \ {0}
       /\ MaxFaults \in Nat

VARIABLES
    load,     \* consumer: record of each load
    back,     \* consumer: loads whose blocks vLLM has again
    mem,      \* consumer: what is in the blocks, by rank and slice: <<attempt, prefill>>
    met,      \* consumer: "current", or "old" (met, and restarted since), or "none"
    open,     \* permissions to write that may not have expired: <<attempt, rank>>
    net,      \* every message that may still arrive, any number of times
    flights,  \* slices on their way
    prod,     \* producer: record of each rank and transfer id
    floor,    \* producer: per rank, highest attempt that was forgotten
    prefills, \* producer: prefills so far, per rank and transfer id
    up,       \* producer: which ranks are running
    spent     \* faults so far

vars == <<load, back, mem, met, open, net, flights, prod, floor, prefills, up, spent>>
consumer == <<load, back, mem, met, open>>
producer == <<prod, floor, prefills, up>>

Loads == 1..MaxLoad
Attempts == 1..2 * MaxLoad
LoadOf(n) == (n + 1) \div 2

Fault(kind) == kind \in Faults /\ spent < MaxFaults /\ spent' = spent + 1
Nobody == [st |-> "idle", att |-> 0, k |-> 0, posted |-> 0, bad |-> FALSE, w |-> FALSE,
           settled |-> 0, failures |-> 0]
Empty == [r \in Ranks |-> [n \in 1..Slices |-> <<0, 0>>]]

\* States of a load.  "asking" is registering, registered and transferring; they differ only in
\* what is sent again.  "finished" is received, and the request has ended since.  "elsewhere" is
\* a bystander: another request, which loads from another engine, into the same blocks.
Live(a) == load[a].st \in {"asking", "draining", "fencing", "elsewhere"}
Over(a) == load[a].st \in {"received", "failed", "finished"}
Listening(a) == load[a].st \in {"asking", "draining"}
Owners == {a \in Loads : (Live(a) \/ load[a].st = "received") /\ a \notin back}
Unsettled(a) == {r \in Ranks : load[a].out[r] = "open"}

\* States of a producer's record.  "idle" is no record, or unknown, allocated, preempted: there
\* is neither a registration nor a finished prefill.  "held" is held and registered.
Max(i, j) == IF i > j THEN i ELSE j
MaxOf(S) == CHOOSE i \in S : \A j \in S : j <= i

-----------------------------------------------------------------------------
\* Messages.  `net` is a set: what is in it may arrive at any time, again and again, in any
\* order, or never; that is loss, duplication, delay and reordering in one.  Taken out is only
\* what could not have an effect any more (for fewer states), and what belonged to a dead
\* incarnation.
\*
\* `accepted` lets the consumer renew, and changes nothing else that is modelled; so whoever
\* sends it puts the renewal that may follow into `net` at once. `alive` is no kind of its own:
\* with the standing failed or unknown it is to the consumer what `failed` is (trigger
\* rank_failed), else what `accepted` is; standing done comes with a `done`. "write_failed" is
\* `failed` with the reason that lets the consumer retry.

Msg(kind, a, r, k) == [kind |-> kind, a |-> a, r |-> r, k |-> k]
FromProducer == {"done", "failed", "write_failed"}
Kinds == {"register", "renew", "cancel"} \union FromProducer

ToProducer(kind, a, ranks) ==
    {Msg(kind, a, r, 0) : r \in IF met = "current" THEN ranks \intersect up ELSE {}}

\* A preempted request names the prefill whose KV it had; others name none, which is 0.
Registrations(n, ranks, named) ==
    {[m EXCEPT !.k = named] : m \in ToProducer("register", n, ranks)}

\* Nobody listens to what is said of an attempt that is over or fenced.
ToConsumer(kind, n, r, k) ==
    IF Listening(LoadOf(n)) /\ load[LoadOf(n)].cur = n THEN {Msg(kind, n, r, k)} ELSE {}

\* `accepted` or `alive`, as answered by the next renewal.
Accepted(n, r) ==
    IF "renew" \in Faults /\ load[LoadOf(n)].st = "asking" /\ load[LoadOf(n)].cur = n
    THEN ToProducer("renew", n, {r}) ELSE {}

\* What is left of `net` when these attempts have ended.
Without(ns) == {m \in net : ~(m.a \in ns /\ m.kind \in FromProducer \union {"renew"})}

-----------------------------------------------------------------------------
\* Consumer: the load.

NewLoad == [st |-> "new", cur |-> 0, xfer |-> First, out |-> [r \in Ranks |-> "open"],
            kv |-> [r \in Ranks |-> 0], count |-> 0, had |-> 0, named |-> 0]

\* The next load, into the same blocks: one under the same transfer id if that is the
\* only one, else a bystander.  vLLM allocates only what it has.  If the load before was received,
\* it may be of the same request, which was preempted.
Load(a, t, preempted) ==
    LET retry == t = First
        named == IF preempted THEN load[a - 1].had ELSE 0
    IN
    /\ preempted => retry /\ a > 1 /\ load[a - 1].had # 0
    /\ load[a].st = "new"
    /\ retry <=> Transfers = {First}
    /\ retry => met # "none"
    /\ \A b \in Loads : b < a => b \in back
    /\ load' = [load EXCEPT ![a] = [NewLoad EXCEPT !.st = IF retry THEN "asking" ELSE "elsewhere",
                                                   !.xfer = t, !.cur = 2 * a - 1,
                                                   !.named = named]]
    /\ mem' = Empty
    /\ net' = net \union Registrations(2 * a - 1, IF retry THEN Ranks ELSE {}, named)
    /\ open' = open \union {<<2 * a - 1, r>> : r \in IF retry THEN Ranks ELSE {}}
    /\ UNCHANGED <<back, met, flights, producer, spent>>

\* The next registration or renewal that goes out carries a new permission.
Renew(a, r) ==
    /\ load[a].st = "asking"
    /\ load[a].out[r] = "open"
    /\ <<load[a].cur, r>> \notin open
    /\ open' = open \union {<<load[a].cur, r>>}
    /\ UNCHANGED <<load, back, mem, met, net, flights, producer, spent>>

\* Permissions end by the producer's clock, wherever the messages are that carry them (decision
\* 0006), so it does not matter whether those have arrived.  While the load asks, the next renewal
\* gives a new one; that nothing is posted in between is possible anyway.
PermissionExpires(n, r) ==
    /\ <<n, r>> \in open
    /\ Pauses \/ load[LoadOf(n)].st # "asking" \/ load[LoadOf(n)].cur # n
    /\ open' = open \ {<<n, r>>}
    /\ UNCHANGED <<load, back, mem, met, net, flights, producer, spent>>

\* What matters of a record from now on; the rest is reset, so that fewer states differ.
Into(a, st, out) ==
    [load[a] EXCEPT !.st = st, !.kv = NewLoad.kv, !.count = 0,
                    !.out = CASE st = "draining" -> [r \in Ranks |-> IF out[r] = "open" THEN "open"
                                                                     ELSE "failed"]
                              [] st = "fencing" -> out
                              [] OTHER -> NewLoad.out]

GiveBack(as) == back' = back \union as

\* Asked to stop are all whose outcome is open.
Drain(a, out) ==
    /\ load' = [load EXCEPT ![a] = Into(a, "draining", out)]
    /\ GiveBack(IF Broken = "freed_before_cancelled" THEN {a} ELSE {})
    /\ net' = net \union ToProducer("cancel", load[a].cur, {r \in Ranks : out[r] = "open"})
    /\ mem' = mem

EndWith(a, st, k) ==
    /\ load' = [load EXCEPT ![a] = [Into(a, st, NewLoad.out) EXCEPT !.had = k]]
    /\ GiveBack(IF st = "received" THEN {} ELSE {a})
    /\ net' = Without({load[a].cur})
    /\ mem' = IF st = "received" THEN mem ELSE Empty

EndTold(a) ==
    /\ load' = [load EXCEPT ![a] = [Into(a, "finished", NewLoad.out) EXCEPT !.had = 0]]
    /\ GiveBack({a})
    /\ net' = Without({load[a].cur}) \union ToProducer("cancel", load[a].cur, Ranks)
    /\ mem' = Empty

End(a, st) == EndWith(a, st, load[a].had)

\* (Of several attempts not the last one: what can follow from that is what follows from the first.)
GiveUp(a) ==
    /\ "giveup" \in Faults
    /\ a = 1 \/ a < MaxLoad
    /\ load[a].st = "asking"
    /\ Drain(a, load[a].out)
    /\ UNCHANGED <<met, open, flights, producer, spent>>

HearDone(m) ==
    LET a == LoadOf(m.a)
        counted == load[a].count + (IF Broken = "done_counted" THEN 1 ELSE 0)
        out == [load[a].out EXCEPT ![m.r] = "done"]
        kv == [load[a].kv EXCEPT ![m.r] = m.k]
        complete == IF Broken = "done_counted" THEN counted = Cardinality(Ranks)
                    ELSE \A r \in Ranks : out[r] = "done"
        same == \A r, q \in Ranks : kv[r] = kv[q] \/ Broken \in {"prefills_mixed", "done_counted"}
        Note(l) == /\ load' = [load EXCEPT ![a] = l]
                   /\ UNCHANGED <<back, mem, net>>
    IN
    /\ m.kind = "done" /\ met # "none"
    /\ CASE load[a].st = "asking" ->
               IF complete /\ same
               THEN EndWith(a, "received", IF "keep" \in Faults THEN m.k ELSE 0)
               ELSE IF complete THEN End(a, "failed")
               ELSE Note([load[a] EXCEPT !.out = out, !.kv = kv, !.count = counted])
         [] load[a].st = "draining" ->     \* settled, too late to count
               IF Unsettled(a) \subseteq {m.r} THEN End(a, "failed")
               ELSE Note(Into(a, "draining", out))
         [] OTHER -> FALSE
    /\ UNCHANGED <<met, open, flights, producer, spent>>

HearFailed(m) ==
    LET a == LoadOf(m.a)
        n == load[a].cur
        last == Unsettled(a) = {m.r}
    IN
    /\ m.kind \in {"failed", "write_failed"} /\ met # "none" /\ Listening(a)
    /\ load[a].out[m.r] = "open"     \* else a duplicate, or the rank has forgotten that it is done
    /\ IF /\ last /\ m.kind = "write_failed" /\ load[a].st = "asking" /\ n = 2 * a - 1
          /\ load[a].named = 0
       THEN \* the same blocks once more; nobody else is writing
            /\ load' = [load EXCEPT ![a].cur = n + 1]
            /\ open' = open \union {<<n + 1, m.r>>}
            /\ net' = Without({n}) \union ToProducer("register", n + 1, {m.r})
            /\ UNCHANGED <<back, mem>>
       ELSE /\ open' = open
            /\ IF last THEN End(a, "failed")
               ELSE Drain(a, [load[a].out EXCEPT ![m.r] = "failed"])
    /\ UNCHANGED <<met, flights, producer, spent>>

\* A rank was silent for too long, did not answer a cancel, or could not be sent to: its whole
\* engine is torn down.  Nobody tells the producer, which may be alive and writing.
Lose ==
    LET hit == {a \in Loads : Listening(a)}
        end == IF Broken = "fence_skipped" THEN "failed" ELSE "fencing"
    IN
    /\ met # "none"
    /\ hit # {}
    /\ met' = "none"
    /\ load' = [a \in Loads |-> IF a \notin hit THEN load[a] ELSE
           Into(a, end, [r \in Ranks |-> IF load[a].out[r] = "open" THEN "lost" ELSE "failed"])]
    /\ GiveBack(IF Broken = "fence_skipped" THEN hit ELSE {})
    /\ net' = {m \in Without({load[a].cur : a \in hit}) :
                  met = "current" \/ m.kind \notin FromProducer}
    /\ UNCHANGED <<mem, open, flights, producer>>

LoseAny == Fault("lose") /\ Lose

\* ... which is the only way out if a rank never answers a cancel.
LoseSilent == /\ \E a \in Loads : load[a].st = "draining"
              /\ Broken # "silent_rank_awaited"
              /\ Lose
              /\ UNCHANGED spent

\* The fence time, as an assumption about time: it is longer than a permission lasts after it was
\* last given, plus the time that a permitted slice takes (`Timings`).
FenceEnds(a) ==
    /\ load[a].st = "fencing"
    /\ \A r \in Ranks : load[a].out[r] = "lost" =>
           /\ \A n \in Attempts : LoadOf(n) = a => <<n, r>> \notin open
           /\ ~\E s \in flights : s.r = r /\ LoadOf(s.a) = a
    /\ End(a, "failed")
    /\ UNCHANGED <<met, open, flights, producer, spent>>

RequestEnds(a) ==
    /\ load[a].st = "received"
    /\ \/ End(a, "finished")
       \/ /\ "keep" \in Faults     \* not preempted, but over: whoever keeps something is told
          /\ EndTold(a)
    /\ UNCHANGED <<met, open, flights, producer, spent>>

\* The side channel tells who the workers are now; the same as before, if there was no restart.
Meet ==
    /\ met = "none"
    /\ up = Ranks
    /\ met' = "current"
    /\ UNCHANGED <<load, back, mem, open, net, flights, producer, spent>>

-----------------------------------------------------------------------------
\* Producer: prefill and registration.

Xfer(n) == load[LoadOf(n)].xfer
Settle(p, a) == [p EXCEPT !.settled = Max(@, a)]
Ended(p, a) == [Settle(p, a) EXCEPT !.st = "failed"]
BeginWrite(p) == [p EXCEPT !.st = "transferring", !.posted = 0, !.bad = FALSE, !.w = TRUE]
InFlight(r, t) == {s \in flights : s.own /\ s.r = r /\ Xfer(s.a) = t}

\* The prompt's KV is complete at this rank.  (Its start is folded into this.)  A second prefill
\* with this id is a rival while the first is not over, else the id is used again.
Prefilled(r, t) ==
    LET p == prod[r][t]
        k == prefills[r][t] + 1
    IN
    /\ r \in up
    /\ prefills[r][t] < MaxPrefill
    /\ t = First
    /\ prefills' = [prefills EXCEPT ![r][t] = k]
    /\ prod' = [prod EXCEPT ![r][t] =
           CASE p.st = "idle" -> [p EXCEPT !.st = "prefilled", !.k = k]
             [] p.st = "held" -> BeginWrite([p EXCEPT !.k = k])
             [] p.st = "failed" /\ p.k = 0 -> [p EXCEPT !.k = k]
             [] p.st \in {"kept", "sent", "failed"} /\ p.k # 0 ->
                    [Settle(p, p.att) EXCEPT !.st = "prefilled", !.att = 0, !.k = k, !.failures = 0]
             [] p.st = "prefilled" -> [p EXCEPT !.st = "failed"]
             [] p.st \in {"transferring", "draining"} -> [p EXCEPT !.st = "draining"]]
    /\ UNCHANGED <<consumer, net, flights, floor, up, spent>>

PrefillAborted(r, t) ==
    LET p == prod[r][t] IN
    /\ Fault("abort")
    /\ r \in up
    /\ prefills[r][t] < MaxPrefill
    /\ t = First
    /\ p.st \in {"idle", "held"}
    /\ prefills' = [prefills EXCEPT ![r][t] = @ + 1]
    /\ prod' = [prod EXCEPT ![r][t] = [Ended(p, p.att) EXCEPT !.k = prefills[r][t] + 1]]
    /\ net' = net \union (IF p.att = 0 THEN {} ELSE ToConsumer("failed", p.att, r, 0))
    /\ UNCHANGED <<consumer, flights, floor, up>>

\* What `register` means (core/classify.py), and what the rows make of it: the record, the answer.
TakeRegister(m) ==
    LET a == m.a
        r == m.r
        t == Xfer(a)
        p == prod[r][t]
        Is(q, answer) == /\ prod' = [prod EXCEPT ![r][t] = q]
                         /\ net' = net \union answer
        accepted == Accepted(a, r)
        failed == ToConsumer("failed", a, r, 0)
        Again == CASE p.st \in {"held", "transferring", "draining"} -> Is(p, accepted)
                   [] p.st \in {"kept", "sent"} -> Is(p, ToConsumer("done", a, r, p.k))
                   [] p.st = "failed" -> Is(Settle(p, a), failed)
        Late == Is(IF p.st = "idle" THEN p ELSE Settle(p, a), failed)
        Stale == Is(p, failed)
        Fresh == CASE p.st = "idle" -> Is([p EXCEPT !.st = "held", !.att = a], accepted)
                   [] p.st = "prefilled" -> Is(BeginWrite([p EXCEPT !.att = a]), accepted)
                   [] p.st = "failed" -> Is(Settle(p, a), failed)
        Anew == CASE p.st = "held" -> Is([Settle(p, p.att) EXCEPT !.att = a], accepted)
                  [] p.st = "transferring" -> Is([Settle(p, a) EXCEPT !.st = "draining"], failed)
                  [] p.st = "kept" /\ m.k # 0 ->
                         Is(BeginWrite([Settle(p, p.att) EXCEPT !.att = a]), accepted)
                  [] OTHER -> Is(Settle(p, a), failed)
        outdated == /\ a <= Max(floor[r], p.settled) \/ a < p.att
                    /\ Broken # "stale_register_accepted"
    IN
    /\ m.kind = "register" /\ r \in up
    /\ IF p.att = a THEN Again
       ELSE IF outdated THEN Stale
       ELSE IF m.k # 0 /\ (p.att = 0 \/ m.k # p.k) /\ Broken # "any_prefill_again" THEN Late
       ELSE IF p.att = 0 THEN Fresh
       ELSE Anew
    /\ UNCHANGED <<consumer, flights, floor, prefills, up, spent>>

TakeCancel(m) ==
    LET a == m.a
        r == m.r
        t == Xfer(a)
        p == prod[r][t]
        asked == IF p.att = 0 THEN a > p.settled ELSE a >= p.att
        answer == ToConsumer("failed", a, r, 0)
    IN
    /\ m.kind = "cancel" /\ r \in up
    /\ IF asked /\ p.st \in {"transferring", "draining"}
       THEN /\ prod' = [prod EXCEPT ![r][t] = [Settle(p, a) EXCEPT !.st = "draining"]]
            /\ net' = net     \* "stopping"; `failed` comes when the last handle has ended
       ELSE /\ prod' = [prod EXCEPT ![r][t] =
                           IF asked /\ p.st \in {"idle", "held", "prefilled"} THEN Ended(p, a)
                           ELSE IF asked /\ p.st = "kept"
                           THEN [Settle(p, a) EXCEPT !.st = "sent"]
                           ELSE IF p.st = "idle" THEN p ELSE Settle(p, a)]
            /\ net' = net \union answer
    /\ UNCHANGED <<consumer, flights, floor, prefills, up, spent>>

TakeRenew(m) ==
    LET a == m.a
        r == m.r
        p == prod[r][Xfer(a)]
    IN
    /\ m.kind = "renew" /\ r \in up
    /\ net' = net \union
           IF p.att # a THEN ToConsumer("failed", a, r, 0)    \* alive, unknown
           ELSE CASE p.st \in {"held", "transferring", "draining"} -> Accepted(a, r)
                  [] p.st \in {"kept", "sent"} -> ToConsumer("done", a, r, p.k)
                  [] p.st = "failed" -> ToConsumer("failed", a, r, 0)
    /\ UNCHANGED <<consumer, flights, producer, spent>>

-----------------------------------------------------------------------------
\* Producer: the write, which starts, lands and completes in steps of its own.

\* Engine.may_write, asked before every slice.
MayWrite(r, t) ==
    /\ prod[r][t].st = "transferring"
    /\ <<prod[r][t].att, r>> \in open

PostSlice(r, t) ==
    LET p == prod[r][t] IN
    /\ r \in up
    /\ p.w /\ ~p.bad /\ p.posted < Slices
    /\ IF Broken = "write_not_rechecked" THEN <<p.att, r>> \in open ELSE MayWrite(r, t)
    /\ prod' = [prod EXCEPT ![r][t].posted = @ + 1]
    /\ flights' = flights \union
           {[r |-> r, a |-> p.att, k |-> p.k, n |-> p.posted + 1, own |-> TRUE]}
    /\ UNCHANGED <<consumer, net, floor, prefills, up, spent>>

SliceLands(s) ==
    /\ flights' = flights \ {s}
    /\ mem' = IF Owners = {} THEN mem ELSE [mem EXCEPT ![s.r][s.n] = <<s.a, s.k>>]
    /\ UNCHANGED <<load, back, met, open, net, producer, spent>>

SliceFails(s) ==
    LET t == Xfer(s.a) IN
    /\ Fault("fail")
    /\ flights' = flights \ {s}
    /\ prod' = IF s.own THEN [prod EXCEPT ![s.r][t].bad = TRUE] ELSE prod
    /\ UNCHANGED <<consumer, net, floor, prefills, up>>

\* Every handle has ended, and there is nothing more to post.  `own` marks this process's slices.
WriteEnds(r, t) ==
    LET p == prod[r][t]
        failed == ToConsumer("failed", p.att, r, 0)
        closed == [p EXCEPT !.w = Broken = "write_not_rechecked", !.bad = FALSE, !.posted =
                       IF Broken = "write_not_rechecked" THEN @ ELSE 0]
    IN
    /\ r \in up
    /\ p.st \in {"transferring", "draining"}
    /\ InFlight(r, t) = {}
    /\ \/ /\ p.st = "transferring" /\ p.bad /\ "retry" \in Faults /\ p.failures = 0
          /\ prod' = [prod EXCEPT ![r][t] = [Settle(closed, p.att) EXCEPT
                 !.st = "prefilled", !.att = 0, !.failures = 1]]
          /\ net' = net \union ToConsumer("write_failed", p.att, r, 0)
       \/ /\ p.st = "draining" \/ (p.bad /\ ("retry" \in Faults => p.failures = 1))
          /\ prod' = [prod EXCEPT ![r][t] = Ended(closed, p.att)]
          /\ net' = net \union failed
       \/ /\ p.st = "transferring" /\ ~p.bad /\ p.posted = Slices
          /\ \/ prod' = [prod EXCEPT ![r][t] = [closed EXCEPT !.st = "sent"]]
             \/ /\ "keep" \in Faults     \* and no later write of it is tried a second time
                /\ prod' = [prod EXCEPT ![r][t] = [closed EXCEPT !.st = "kept", !.failures = 1]]
          /\ net' = net \union ToConsumer("done", p.att, r, p.k)
    /\ UNCHANGED <<consumer, flights, floor, prefills, up, spent>>

-----------------------------------------------------------------------------
\* Producer: deadlines, losses, crashes.

Expires(r, t) ==
    LET p == prod[r][t] IN
    /\ "expire" \in Faults
    /\ r \in up
    /\ p.st \in {"held", "prefilled", "transferring", "kept"}
    /\ prod' = [prod EXCEPT ![r][t] =
           CASE p.st = "transferring" -> [p EXCEPT !.st = "draining"]
             [] p.st = "kept" -> [p EXCEPT !.st = "sent"]
             [] OTHER -> Ended(p, p.att)]
    /\ net' = net \union (IF p.st = "held" THEN ToConsumer("failed", p.att, r, 0) ELSE {})
    /\ UNCHANGED <<consumer, flights, floor, prefills, up, spent>>

\* A tombstone is forgotten; what it had settled stays so by the consumer's floor.
Forgets(r, t) ==
    LET p == prod[r][t] IN
    /\ "forget" \in Faults
    /\ r \in up
    /\ p.st \in {"sent", "failed"}
    \* A tombstone outlives every permission that was given before it: one that is still there must
    \* be newer, so the consumer still asks.  Needed only if the floor does not do its work.
    /\ Broken = "floor_dropped" => \A n \in {p.att, p.settled} \ {0} :
           <<n, r>> \in open => load[LoadOf(n)].st = "asking" /\ load[LoadOf(n)].cur = n
    /\ prod' = [prod EXCEPT ![r][t] = Nobody]
    /\ floor' = [floor EXCEPT ![r] = Max(@, Max(p.settled, p.att))]
    /\ UNCHANGED <<consumer, net, flights, prefills, up, spent>>

\* This rank could not send to the consumer, or could not end a write to it: it forgets it until the
\* next hello.
DropsConsumer(r) ==
    /\ Fault("drop")
    /\ r \in up
    /\ prod' = [prod EXCEPT ![r] = [t \in Transfers |->
           CASE prod[r][t].st = "held" -> [prod[r][t] EXCEPT !.st = "failed"]
             [] prod[r][t].st = "transferring" -> [prod[r][t] EXCEPT !.st = "draining"]
             [] prod[r][t].st = "kept" -> [prod[r][t] EXCEPT !.st = "sent"]
             [] OTHER -> prod[r][t]]]
    /\ floor' = [floor EXCEPT ![r] = IF Broken = "floor_dropped" THEN 0 ELSE @]
    /\ UNCHANGED <<consumer, net, flights, prefills, up>>

\* The process is gone with all it knew.  What it had posted may still land.
Crash(r) ==
    /\ Fault("crash")
    /\ r \in up
    /\ up' = up \ {r}
    /\ prod' = [prod EXCEPT ![r] = [t \in Transfers |-> Nobody]]
    /\ floor' = [floor EXCEPT ![r] = 0]
    /\ flights' = {IF s.r = r THEN [s EXCEPT !.own = FALSE] ELSE s : s \in flights}
    /\ net' = {m \in net : m.r = r => m.kind \in FromProducer}
    /\ UNCHANGED <<consumer, prefills>>

\* The engine comes back, all ranks of it, under a new incarnation.  Messages to the old one reach
\* nobody; messages of the old one are heard only by a consumer that has not noticed.
Restart ==
    /\ up # Ranks
    /\ up' = Ranks
    /\ prod' = [r \in Ranks |-> [t \in Transfers |-> Nobody]]
    /\ floor' = [r \in Ranks |-> 0]
    /\ prefills' = [r \in Ranks |-> [t \in Transfers |-> MaxOf({prefills[q][t] : q \in Ranks})]]
    /\ flights' = {[s EXCEPT !.own = FALSE] : s \in flights}
    /\ met' = IF met = "current" THEN "old" ELSE met
    /\ net' = {m \in net : met # "none" /\ m.kind \in FromProducer}
    /\ UNCHANGED <<load, back, mem, open, spent>>

-----------------------------------------------------------------------------

Init ==
    /\ load = [a \in Loads |-> IF a # 1 THEN NewLoad
                               ELSE [NewLoad EXCEPT !.st = "asking", !.cur = 1]]
    /\ back = {}
    /\ mem = Empty
    /\ met = "current"
    /\ open = {<<1, r>> : r \in Ranks}
    /\ net = {Msg("register", 1, r, 0) : r \in Ranks}
    /\ flights = {}
    /\ prod = [r \in Ranks |-> [t \in Transfers |-> Nobody]]
    /\ floor = [r \in Ranks |-> 0]
    /\ prefills = [r \in Ranks |-> [t \in Transfers |-> 0]]
    /\ up = Ranks
    /\ spent = 0

Hear(m) == HearDone(m) \/ HearFailed(m)
Take(m) == TakeRegister(m) \/ TakeCancel(m) \/ TakeRenew(m)

Next ==
    \/ \E a \in Loads :
           \/ GiveUp(a) \/ FenceEnds(a) \/ RequestEnds(a)
           \/ \E t \in Transfers, preempted \in BOOLEAN : Load(a, t, preempted)
           \/ \E r \in Ranks : Renew(a, r)
    \/ \E n \in Attempts, r \in Ranks : PermissionExpires(n, r)
    \/ LoseAny \/ LoseSilent \/ Meet \/ Restart
    \/ \E m \in net : Hear(m) \/ Take(m)
    \/ \E s \in flights : SliceLands(s) \/ SliceFails(s)
    \/ \E r \in Ranks :
           \/ DropsConsumer(r) \/ Crash(r)
           \/ \E t \in Transfers :
                  \/ Prefilled(r, t) \/ PrefillAborted(r, t)
                  \/ PostSlice(r, t) \/ WriteEnds(r, t)
                  \/ Expires(r, t) \/ Forgets(r, t)

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
\* Safety (specs/invariants.md).

TypeOK ==
    /\ \A a \in Loads :
           /\ load[a].st \in {"new", "asking", "draining", "fencing", "received", "failed",
                              "finished", "elsewhere"}
           /\ load[a].xfer \in Transfers
           /\ \A r \in Ranks : load[a].out[r] \in {"open", "done", "failed", "lost"}
           /\ {load[a].had, load[a].named} \subseteq 0..MaxPrefill
    /\ back \subseteq Loads
    /\ met \in {"current", "old", "none"}
    /\ open \subseteq Attempts \X Ranks
    /\ \A m \in net : m.kind \in Kinds
    /\ \A r \in Ranks, t \in Transfers :
           /\ prod[r][t].st \in {"idle", "held", "prefilled", "transferring", "draining", "kept",
                                 "sent", "failed"}
           /\ prod[r][t].att \in {0} \union Attempts
           /\ Broken = "none" => prod[r][t].w = (prod[r][t].st \in {"transferring", "draining"})

\* S1: a block is the destination of at most one live load.
S1 == Cardinality({a \in Loads : Live(a) \/ load[a].st = "received"}) <= 1

\* S2: destination blocks are not given back while a producer might write them: nothing is on its
\* way to them, and no rank might post another slice.  Nor when another attempt is to fill them.
S2 ==
    \A a \in Loads, n \in Attempts :
        a = LoadOf(n) /\ (a \in back \/ Over(a) \/ n < load[a].cur) =>
            /\ \A s \in flights : s.a # n
            /\ \A r \in up : LET p == prod[r][Xfer(n)] IN
                   ~(MayWrite(r, Xfer(n)) /\ p.att = n /\ p.posted < Slices)

\* S3: source blocks are not given back while one of our writes may read them.  (Pinned are the
\* blocks of a record that is prefilled, transferring, draining or kept.)
S3 ==
    \A s \in flights : s.own =>
        LET p == prod[s.r][Xfer(s.a)] IN
        p.st \in {"transferring", "draining"} /\ p.att = s.a /\ p.k = s.k

\* S4: a slice is posted only from a pinned prefill, while `may_write` holds, one write per
\* transfer.  (A property of steps.)
S4 ==
    [][\A s \in flights' : s.own /\ s \notin flights =>
           /\ MayWrite(s.r, Xfer(s.a))
           /\ prod[s.r][Xfer(s.a)].att = s.a
           /\ prod[s.r][Xfer(s.a)].k = s.k
           /\ \A q \in InFlight(s.r, Xfer(s.a)) : q.a = s.a /\ q.k = s.k]_vars

\* S5: a load is reported to vLLM once: what is over stays as it is.  (A property of steps.)
S5 ==
    [][\A a \in Loads : Over(a) =>
           load'[a].st = load[a].st \/ (load[a].st = "received" /\ load'[a].st = "finished")]_vars

\* S6: a load that is reported received holds exactly the right bytes, and keeps them: all slices of
\* all ranks, of one and the same prefill; of a preempted request, of the one that it had before.
S6 ==
    \A a \in Loads : load[a].st = "received" =>
        \E k \in {n \in 1..MaxPrefill : load[a].named \in {0, n}} : \A r \in Ranks, n \in 1..Slices :
            mem[r][n] \in {<<2 * a - 1, k>>, <<2 * a, k>>}

\* S7: nothing lands in a block of another transfer.
S7 ==
    \A a \in Owners : \A r \in Ranks, n \in 1..Slices : mem[r][n][1] \in {0, 2 * a - 1, 2 * a}

-----------------------------------------------------------------------------
\* Liveness.  Nothing is assumed of messages: every one may be lost for ever.  Fair are
\* deadlines, slices (they land or fail), and the ends of writes.

Deadlines ==
    /\ \A a \in Loads : WF_vars(GiveUp(a)) /\ WF_vars(FenceEnds(a)) /\ WF_vars(RequestEnds(a))
    /\ \A n \in Attempts, r \in Ranks : WF_vars(PermissionExpires(n, r))
    /\ WF_vars(LoseSilent)
    /\ WF_vars(\E s \in flights : SliceLands(s))
    /\ \A r \in Ranks, t \in Transfers :
           WF_vars(WriteEnds(r, t)) /\ WF_vars(Expires(r, t)) /\ WF_vars(Forgets(r, t))

LiveSpec == Spec /\ Deadlines

\* L1: once the faults stop, every request ends within its deadline, and in the end every table is
\* empty.  (A duplicate cancel makes a tombstone again, so tables are empty again and again.)
L1 ==
    /\ \A a \in Loads : Live(a) ~> Over(a)
    /\ \A r \in Ranks, t \in Transfers :
           /\ <>[](prod[r][t].st \in {"idle", "sent", "failed"})
           /\ []<>(r \in up => prod[r][t].st = "idle")

\* On a good day (Faults = {}, and what is sent often enough arrives) the KV arrives, however
\* often permissions run out on the way.
Progress ==
    /\ \A r \in Ranks, a \in Loads :
           /\ WF_vars(Renew(a, r))
           /\ WF_vars(\E m \in net : m.r = r /\ LoadOf(m.a) = a /\ TakeRegister(m))
           /\ WF_vars(\E m \in net : m.r = r /\ LoadOf(m.a) = a /\ HearDone(m))
    /\ \A r \in Ranks, t \in Transfers :
           WF_vars(Prefilled(r, t)) /\ SF_vars(PostSlice(r, t)) /\ WF_vars(WriteEnds(r, t))
    /\ WF_vars(\E s \in flights : SliceLands(s))

GoodSpec == Spec /\ Progress
Received == <>(load[1].st = "received")

-----------------------------------------------------------------------------
\* Witnesses: each says that something interesting never happens, and TLC must find that it does.

NeverReceived == \A a \in Loads : load[a].st # "received"
NeverReceivedInTheEnd == spent > 0 => load[MaxLoad].st # "received"
NeverReceivedByRetry == \A a \in Loads : ~(load[a].st = "received" /\ load[a].cur = 2 * a)
NeverReceivedAgain == \A a \in Loads : ~(load[a].st = "received" /\ load[a].named # 0)
NeverWritingWhileFenced ==
    ~\E a \in Loads, r \in up : load[a].st = "fencing" /\ MayWrite(r, load[a].xfer)

\* Once everything is over, nothing is on its way and no permission is left, nothing of the above
\* can be broken any more (a slice needs a permission, and those come from loads): not explored.
Interesting == (\A a \in Loads : Over(a) \/ load[a].st = "elsewhere") => open # {} \/ flights # {}

\* The ranks do the same, so states that differ only in their names are one (not for liveness).
Symmetry == Permutations(Ranks)
=============================================================================
