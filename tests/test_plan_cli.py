"""`kvflow plan`: what it prints, what it refuses, and what the documents quote of it."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvflow.cli import app
from kvflow.planning.description import read
from kvflow.planning.plan import Request, plan

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = ROOT / "examples" / "layouts"
SMALL: dict[str, Any] = {
    "model": "small",
    "dtype": "float16",
    "layout": "HND",
    "block_size": 16,
    "pool_blocks": 500,
    "kv_heads": 4,
    "head_size": 8,
    "groups": [{"kind": "full", "layers": 2}],
}
CELL = 2 * 8 * 2
"""Bytes of a token and head of it: key and value."""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def described(directory: Path, name: str, **changes: object) -> str:
    """A file; a change to None leaves the key out."""
    fields = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    path = directory / f"{name}.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return str(path)


def planned(producer: str, consumer: str, *options: str) -> dict[str, Any]:
    result = invoke("--producer", producer, "--consumer", consumer, "--json", *options)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refused(producer: str, consumer: str, *options: str) -> tuple[int, str]:
    result = invoke("--producer", producer, "--consumer", consumer, *options)
    assert result.stdout == ""
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stderr.strip()


# -- plans ---------------------------------------------------------------------------------------


def test_equal_engines_write_rank_to_rank_in_one_run_per_layer(tmp_path: Path) -> None:
    engine = described(tmp_path, "engine", tp=2)
    document = planned(engine, engine, "--tokens", "64")
    block = 64 * 2 * CELL
    one = {"runs": 2, "bytes": 2 * block, "smallest": block, "median": block, "largest": block}
    assert document["shares"] == [
        {"producer": f"pp0.tp{tp}", "consumer": f"pp0.tp{tp}", "layers": 2, "heads": heads, **one}
        for tp, heads in enumerate(("0-1", "2-3"))
    ]
    assert document["total"] == {**one, "runs": 4, "bytes": 4 * block}
    assert document["idle"] == []
    assert document["histogram"] == [
        {"from": block, "below": 2 * block, "runs": 4, "bytes": 4 * block}
    ]


def test_a_hit_is_not_written_again(tmp_path: Path) -> None:
    engine = described(tmp_path, "engine")
    document = planned(engine, engine, "--tokens", "64", "--hit", "48")
    assert document["total"]["bytes"] == 16 * 4 * CELL * 2
    document = planned(engine, engine, "--tokens", "64", "--hit", "64")
    assert (document["shares"], document["histogram"]) == ([], [])
    assert document["idle"] == ["pp0.tp0"]


def test_scattered_blocks_are_more_runs_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    engine = described(tmp_path, "engine")
    options = ("--tokens", "512")
    whole, scattered = (
        planned(engine, engine, *options, *more) for more in ((), ("--fragmented",))
    )
    assert whole["total"]["bytes"] == scattered["total"]["bytes"]
    assert whole["total"]["runs"] == 2
    assert scattered["total"]["runs"] > 32
    assert scattered == planned(engine, engine, *options, "--fragmented")


def test_stages_are_bridged(tmp_path: Path) -> None:
    one, two = described(tmp_path, "one"), described(tmp_path, "two", pp=2)
    shares = planned(one, two, "--tokens", "16")["shares"]
    assert [(share["producer"], share["consumer"], share["layers"]) for share in shares] == [
        ("pp0.tp0", "pp0.tp0", 1),
        ("pp0.tp0", "pp1.tp0", 1),
    ]


def test_each_kind_of_group_moves_what_it_keeps(tmp_path: Path) -> None:
    groups = [
        {"kind": "full", "layers": 1},
        {"kind": "sliding", "layers": 1, "window": 32},
        {"kind": "mla", "layers": 1, "head_size": 24, "block_size": 8},
        {"kind": "state", "layers": 1, "state_bytes": 1000},
    ]
    engine = described(tmp_path, "engine", groups=groups, tp=2)
    document = planned(engine, engine, "--tokens", "64")
    latent, state = 64 * 24 * 2, 1000
    assert [share["heads"] for share in document["shares"]] == [
        "0-1, latent, state",
        "2-3, latent, state",
    ]
    assert document["total"]["bytes"] == 2 * ((64 + 32) * 2 * CELL + latent + state)


@pytest.mark.parametrize("layout", ["cpu-vec", "cpu-amx"])
def test_cpu_layouts_move_whole_blocks_as_one_run(tmp_path: Path, layout: str) -> None:
    engine = described(tmp_path, "engine", layout=layout, head_size=16, dtype="bfloat16")
    document = planned(engine, engine, "--tokens", "32")
    assert document["total"]["runs"] == 2
    assert document["total"]["bytes"] == 2 * 32 * 4 * 2 * 16 * 2


def test_kernel_blocks_smaller_than_block_ids_change_nothing_between_equals(tmp_path: Path) -> None:
    whole = described(tmp_path, "whole")
    parts = described(tmp_path, "parts", kernel_block_size=4)
    assert planned(parts, parts)["total"] == planned(whole, whole)["total"]
    assert planned(whole, parts)["total"]["runs"] > planned(whole, whole)["total"]["runs"]


def test_text_and_json_say_the_same(tmp_path: Path) -> None:
    one, two = described(tmp_path, "one", tp=4), described(tmp_path, "two", tp=1)
    document = planned(one, two, "--tokens", "64")
    text = invoke("--producer", one, "--consumer", two, "--tokens", "64").stdout
    for share in (*document["shares"], document["total"]):
        numbers = (share[name] for name in ("runs", "bytes", "smallest", "median", "largest"))
        assert re.search(r"\s+".join(f"{number:,}" for number in numbers), text)
    for bucket in document["histogram"]:
        assert re.search(rf"\s{bucket['runs']:,}\s+{bucket['bytes']:,}\s+#+", text)


# -- refused -------------------------------------------------------------------------------------


def group(**fields: object) -> dict[str, object]:
    return {"groups": [{"layers": 1, **fields}]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": None}, "missing required field `model`"),
        ({"colour": "red"}, "unknown field `colour`"),
        (group(kind="full", colour="red"), "unknown field `colour` - at `$.groups[0]`"),
        ({"tp": 0}, "Expected `int` >= 1 - at `$.tp`"),
        ({"tp": 64, "pp": 64, "kv_heads": 64}, "tp 64 times pp 64 is over 1024"),
        ({"layout": "NH"}, "Invalid enum value 'NH' - at `$.layout`"),
        ({"dtype": "int3"}, "Invalid enum value 'int3' - at `$.dtype`"),
        ({"groups": []}, "Expected `array` of length >= 1 - at `$.groups`"),
        ({"groups": 3}, "Expected `array`, got `int` - at `$.groups`"),
        ({"pool_blocks": "many"}, "Expected `int`, got `str` - at `$.pool_blocks`"),
        ({"tp": 3}, "groups[0].kv_heads: 4 cannot be split over tp 3"),
        ({"kv_heads": None}, "groups[0].kv_heads: neither the group nor the engine says"),
        ({"head_size": None}, "groups[0].head_size: neither the group nor the engine says"),
        ({"kernel_block_size": 5}, "groups[0].kernel_block_size: 5 does not divide block_size 16"),
        ({"layout": "cpu-amx"}, "groups[0].head_size: 8 is not a multiple of 16"),
        (group(kind="sliding"), "groups[0].window: a sliding group has one, and no other"),
        (group(kind="full", window=8), "groups[0].window: a sliding group has one, and no other"),
        (group(kind="state"), "groups[0].state_bytes: a state group has them, and no other"),
        (group(kind="linear"), "Invalid enum value 'linear' - at `$.groups[0].kind`"),
    ],
)
def test_a_bad_description_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    good, bad = described(tmp_path, "good"), described(tmp_path, "bad", **changes)
    for pair in ((good, bad), (bad, good)):
        code, said = refused(*pair)
        assert code == 2
        assert sentence in said
        assert said.startswith(f"{bad}: ")
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"\xff\xfe", "malformed"),
        (b'{"model": "\xff"}', "UTF-8"),
    ],
)
def test_what_is_no_json_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    code, said = refused(str(bad), str(bad))
    assert code == 2
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    assert refused(path, path) == (2, f"{path}: No such file or directory")


def test_a_pool_that_is_too_small_is_refused(tmp_path: Path) -> None:
    engine = described(tmp_path, "engine", pool_blocks=4)
    assert planned(engine, engine, "--tokens", "48")["total"]["runs"] == 2
    code, said = refused(engine, engine, "--tokens", "49")
    assert code == 2
    assert said.startswith("producer: 49 tokens need 4 blocks besides the null block")


def test_more_hits_than_tokens_are_refused(tmp_path: Path) -> None:
    engine = described(tmp_path, "engine")
    code, said = refused(engine, engine, "--tokens", "5", "--hit", "6")
    assert code == 2
    assert "6 of 5 tokens" in said


def test_memory_beyond_the_last_address_is_refused(tmp_path: Path) -> None:
    engine = described(tmp_path, "engine", head_size=2**24, kv_heads=2**20, pool_blocks=2**24)
    code, said = refused(engine, engine)
    assert code == 2
    assert said == "small: region of 0.0: it ends beyond the last address"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "large"}, "incompatible peers: model is 'small 2xfull(4x8)' here"),
        ({"dtype": "float32"}, "KV cache dtype is 'float16' here and 'float32' there"),
        ({"tp": 2, "pp": 3}, "pipeline-parallel size is 2 here and 3 there"),
        ({"layout": "cpu-vec"}, "encoding of 0.0 is 'float16' here and 'float16/cpu-vec' there"),
    ],
)
def test_engines_between_which_nothing_can_move_end_with_1_and_the_reason(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    engine = described(tmp_path, "engine", pp=2)
    code, said = refused(engine, described(tmp_path, "other", **{"pp": 2, **changes}))
    assert code == 1
    assert sentence in said


# -- examples and documents ----------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(LAYOUTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_examples_can_be_read(path: Path) -> None:
    assert read(path).groups


def quoted() -> list[tuple[str, str]]:
    """(command, output) of every block of specs/layouts.md that begins with a command."""
    text = (ROOT / "specs" / "layouts.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n\$ kvflow plan (.*?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(arguments.replace("\\\n", " "), output) for arguments, output in blocks]


def test_the_document_quotes_what_each_example_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    used = set()
    for arguments, output in quoted():
        words = shlex.split(arguments)
        assert invoke(*words).stdout == output
        used |= {Path(word).stem for word in words if word.endswith(".json")}
    assert used == {path.stem for path in LAYOUTS.glob("*.json")}


def test_the_document_tells_the_runs_of_other_layouts() -> None:
    text = (ROOT / "specs" / "layouts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]+) \| ([A-Z]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) > 5
    sides = [read(LAYOUTS / f"qwen3-32b-tp{tp}.json") for tp in (8, 4)]
    request = Request(tokens=4096, hit=0, fragmented=False)
    for *layouts, runs, median in rows:
        engines = [
            msgspec.structs.replace(side, layout=layout)
            for side, layout in zip(sides, layouts, strict=True)
        ]
        lengths = plan(*engines, request).lengths
        assert (f"{len(lengths):,}", f"{int(np.median(lengths)):,}") == (runs, median)
