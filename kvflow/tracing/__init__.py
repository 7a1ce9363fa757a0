"""Reads the traces of several engines together: where the time of each request went.

lines      the schema, and reading files of it.
clocks     how far the engines' clocks are apart, from the messages themselves.
transfers  the lines of one transfer, of both sides, on one clock.
parts      the names of what a request's time consists of.
waterfall  the critical path of one request, as parts that add up to its span.
figures    what all requests together say: percentiles, endings, what is unfinished.
terminal, perfetto, page
           three ways to look at it; `cli` has the commands.

Times are whole microseconds from `lines.micros` on, so that parts add up exactly.
"""
