"""Options of `kvflow bench serve`: what is refused, and with which sentence."""

import importlib.util
import re

import pytest
from typer.testing import CliRunner

from kvflow.bench import serve_options
from kvflow.bench.serve_options import OptionError
from kvflow.cli import app


def refused(*arguments: str) -> str:
    """The text of the refusal, without the box that is drawn around it."""
    ran = CliRunner().invoke(app, ["bench", "serve", *arguments], env={"COLUMNS": "200"})
    assert ran.exit_code == 2, ran.output
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", ran.output).split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rates", "1,fast"), "--rates: 'fast' is not one of: requests/s above 0"),
        (("--rates", "0"), "--rates: '0' is not one of: requests/s above 0"),
        (("--rates", "nan"), "--rates: 'nan' is not one of: requests/s above 0"),
        (("--lengths", "512,0"), "--lengths: '0' is not one of: tokens, at least 1"),
        (("--lengths", "1.5"), "--lengths: '1.5' is not one of: tokens, at least 1"),
        (
            ("--connectors", "kvflow-push,nccl"),
            "--connectors: 'nccl' is not one of: kvflow-streamed, kvflow-push, kvflow-pull, "
            "upstream-push, upstream-pull",
        ),
        (
            ("--producer-devices", "0-x"),
            "--producer-devices: '0-x' is no device number or range, such as 0-7",
        ),
        (
            ("--producer-devices", "3-1"),
            "--producer-devices: the range '3-1' goes backwards",
        ),
        (
            ("--tensor-parallel-size", "4", "--consumer-devices", "4-6"),
            "--consumer-devices: 3 devices, and --tensor-parallel-size is 4",
        ),
        (
            ("--producer-devices", "0-3", "--consumer-devices", "3-6"),
            "--consumer-devices: the producer has 3 as well",
        ),
    ],
)
def test_a_bad_option_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert f"Invalid value for {sentence}" in refused(*arguments)


def test_a_picture_without_matplotlib_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    text = refused("--png", "x.png")
    assert "Invalid value for --png: needs matplotlib: pip install 'kvflow[bench]'" in text


def test_lists_keep_their_order_and_lose_their_doubles() -> None:
    assert serve_options.rates("2, 0.5,2") == (2.0, 0.5)
    assert serve_options.lengths("2048,512") == (2048, 512)
    assert serve_options.connectors("b,a", ("a", "b")) == ("b", "a")
    with pytest.raises(OptionError):
        serve_options.rates("")


def test_devices_are_numbers_and_ranges() -> None:
    assert serve_options.devices("--producer-devices", "0-2,7") == ("0", "1", "2", "7")
    assert serve_options.devices("--producer-devices", None) is None


def test_options_can_be_written_as_json() -> None:
    options = serve_options.ServeOptions(
        connectors=("a",), rates=(1.0,), lengths=(5,), requests=1, repeats=1
    )
    assert options.json()["rates"] == (1.0,)
    assert options.json()["out"] is None
