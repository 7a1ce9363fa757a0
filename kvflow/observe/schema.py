"""The NDJSON trace, as `observe.trace` writes it and `tracing.lines` reads it.

Version 2 (version 1 had the transitions only); optional keys are there when they are known:

v        2
t        Unix time in seconds
engine   engine id
rank     "pp0.tp0", or "scheduler" for what vLLM's scheduler sees
machine  "producer", "consumer" or "peer": a transition.
         "write" or "read": an order to move KV is over.
         "request": of a request that kvflow has to do with, as vLLM's scheduler sees it.
         "trace": the file has reached its limit, and ends here.
id       transfer id (of a producer's: its part), or a peer's address or agent name
attempt  number of the registration, 0 when there is none
request  vLLM's request id
trigger, from, to
         the row that was taken. Of an order: what became of it, "posted", the same.
         Of a request: "arrived", "scheduled" (the first step that computes any of it),
         "first_token" (seen by the step after the one that made it) or "finished".
reason   why a transfer ended without its KV, or how a request finished (optional)
detail   what the far side or a library said (optional)
peer     the other side (optional)
bytes, runs
         what was written by this producer, or read by this consumer (optional)
posts    of an order: slices (optional)
began    of an order: when it was taken, Unix time (optional)
ms       milliseconds spent in each state, when the transfer is over; of an order: "plan" and
         "post", which is inside the transfer library (optional)
role     of a request: "producer" or "consumer" (optional)
tokens   of a request that arrives: those of its prompt (optional)
arrival  of a request that arrives: when vLLM's API server received it, Unix time (optional)
"""

VERSION = 2
READABLE = (1, VERSION)
WRITE = "write"
READ = "read"
ORDERS = (WRITE, READ)
"""Machines of the lines that tell of one WRITE or READ order."""
REQUEST = "request"
"""Machine of the lines that tell of vLLM's side."""
TRACE = "trace"
"""Machine of the lines that tell of the trace itself."""
