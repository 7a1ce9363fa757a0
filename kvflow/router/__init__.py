"""A small OpenAI-compatible router for split prefill and decode.

Rules: nothing here imports vllm, torch or nixl; an engine is known by what its HTTP server and its
side channel say; a request that was accepted ends, whatever an engine does.

The idea: a request is a *dispatch*, one or several times: a producer and a consumer are chosen, a
fresh transfer id is minted, and both *legs* are sent, at once (push) or one after the other (pull).
Until the first token has gone to the client, a dispatch that fails may be followed by another one,
with other engines; after that, nothing is repeated.

    legs.py      the bodies of the two legs; which requests have none.  Pure.
    config.py    what an operator may set.
    engines.py   the engines, what is in flight on each, who waits for one.
    policies.py  which engine is chosen.
    meeting.py   who an engine is: asked before it is used.
    watching.py  whether it is well: asked once a second.
    upstream.py  one leg over HTTP.
    dispatch.py  two legs as one.
    metrics.py   what is counted.
    app.py       the HTTP side that clients see.
    server.py    the process: checks, start, end.
"""
