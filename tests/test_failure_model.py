"""Documents name tests, and those must exist; every kind of failure, and reason, must be there."""

import re
from pathlib import Path

import pytest

from kvflow.core import Reason

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "specs" / "failure-model.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["failure-model.md", "troubleshooting.md"])
def test_every_named_test_exists(name: str) -> None:
    text = (ROOT / "specs" / name).read_text(encoding="utf-8")
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    known = set(re.findall(r"def (test_\w+)\(", sources))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named, "the table names no test at all"
    assert not named - known


def test_every_kind_of_failure_has_its_line() -> None:
    assert re.findall(r"^\| (F\d+) \|", TEXT, re.MULTILINE) == [f"F{n}" for n in range(1, 24)]


NEVER_ALONE = {"deadline", "mismatch", "stale", "superseded"}
"""Bounds of everything, and what an older attempt ends with: nothing to be done about."""


def test_troubleshooting_explains_every_reason_that_asks_for_something() -> None:
    text = (ROOT / "specs" / "troubleshooting.md").read_text(encoding="utf-8")
    told = {reason for reason in Reason if f"`{reason}`" in text or f"reason={reason}" in text}
    assert set(Reason) - told == NEVER_ALONE
