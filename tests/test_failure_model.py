"""specs/failure-model.md names tests: they must exist, and every kind of failure must be there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "specs" / "failure-model.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    known = set(re.findall(r"def (test_\w+)\(", sources))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert named, "the table names no test at all"
    assert not named - known


def test_every_kind_of_failure_has_its_line() -> None:
    assert re.findall(r"^\| (F\d+) \|", TEXT, re.MULTILINE) == [f"F{n}" for n in range(1, 24)]
