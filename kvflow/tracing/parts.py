"""What a request's time consists of: the closed vocabulary of `kvflow.tracing.waterfall`."""

import enum
from dataclasses import dataclass


class Part(enum.StrEnum):
    """One kind of time on the way to the first token, in the order in which they come."""

    QUEUE = "queue"
    PREFILL = "prefill"
    REGISTRATION = "registration"
    MATCH = "match"
    PLANNING = "planning"
    POSTING = "posting"
    WIRE = "wire"
    NOTICE = "notice"
    GIVING_UP = "giving_up"
    LOCAL = "local"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a part is shown: one letter where there are no colours, and a colour (#rrggbb)."""

    letter: str
    colour: str
    meaning: str


LOOKS: dict[Part, Look] = {
    Part.QUEUE: Look(
        letter="q",
        colour="#d99a00",
        meaning="from the arrival in an engine until it is scheduled, or has blocks allocated",
    ),
    Part.PREFILL: Look(
        letter="p",
        colour="#3f7fdb",
        meaning="the producer computes the prompt; writes during it are hidden behind it",
    ),
    Part.REGISTRATION: Look(
        letter="r",
        colour="#9055d6",
        meaning="the consumer meets the producer and registers, until that is on record there",
    ),
    Part.MATCH: Look(
        letter="m",
        colour="#8a8f98",
        meaning="one side is ready and the other leg is not there yet, or nobody has begun to move",
    ),
    Part.PLANNING: Look(
        letter="l", colour="#00a0a8", meaning="blocks are made into runs of bytes, after the match"
    ),
    Part.POSTING: Look(
        letter="o", colour="#2c9c5a", meaning="inside the transfer library's calls, after the match"
    ),
    Part.WIRE: Look(
        letter="w",
        colour="#86b817",
        meaning="the rest of the WRITEs or READs after the match: bytes on their way",
    ),
    Part.NOTICE: Look(
        letter="n",
        colour="#d4569a",
        meaning="what one side is done with, until the other side knows of it",
    ),
    Part.GIVING_UP: Look(
        letter="g",
        colour="#c8372d",
        meaning="a load was given up, until nothing can land any more and vLLM is told",
    ),
    Part.LOCAL: Look(
        letter="c",
        colour="#a5876a",
        meaning="the consumer computes the prompt itself: nothing was loaded, or the load failed",
    ),
    Part.STEP: Look(
        letter="s",
        colour="#dd6b35",
        meaning="from the KV's arrival to the first token: vLLM's scheduler and one step",
    ),
}
