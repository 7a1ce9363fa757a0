"""What a check says: how bad it is, what was found, why it matters, what to set."""

import enum
from dataclasses import dataclass

NOTHING = "Nothing."


class Severity(enum.StrEnum):
    """How bad it is; `BREAKS` alone makes the exit status 1."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BREAKS = "breaks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check has found; each of the three texts is whole sentences.

    found  with its values.
    why    what comes of it.
    to_do  what to set, or `NOTHING`.
    """

    severity: Severity
    found: str
    why: str
    to_do: str = NOTHING


def ok(found: str, why: str) -> Finding:
    return Finding(severity=Severity.OK, found=found, why=why)


def note(found: str, why: str, to_do: str = NOTHING) -> Finding:
    return Finding(severity=Severity.NOTE, found=found, why=why, to_do=to_do)


def warning(found: str, why: str, to_do: str) -> Finding:
    return Finding(severity=Severity.WARNING, found=found, why=why, to_do=to_do)


def breaks(found: str, why: str, to_do: str) -> Finding:
    return Finding(severity=Severity.BREAKS, found=found, why=why, to_do=to_do)
