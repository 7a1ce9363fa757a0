"""Two engines: described ones, and ones met over real side channels."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvflow.doctor import network
from kvflow.doctor.checks import pair
from kvflow.doctor.described import side
from kvflow.doctor.facts import Side
from kvflow.doctor.findings import Finding, Severity
from kvflow.ids import Address
from kvflow.io.seal import Seal

from .made_up import named, the_worst, worst
from .side_channels import HERE, engine

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE: dict[str, Any] = {
    "model": "small",
    "dtype": "float16",
    "layout": "HND",
    "block_size": 16,
    "pool_blocks": 500,
    "kv_heads": 4,
    "head_size": 8,
    "groups": [{"kind": "full", "layers": 2}],
}


def described(directory: Path, name: str, **changes: object) -> Side:
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**ENGINE, **changes}), encoding="utf-8")
    return side(name, path)


def compared(directory: Path, **consumer: object) -> list[Finding]:
    sides = described(directory, "producer"), described(directory, "consumer", **consumer)
    return list(pair.check(*sides))


# -- described -----------------------------------------------------------------------------------


def test_equal_engines_are_in_order(tmp_path: Path) -> None:
    assert worst(compared(tmp_path)) is Severity.OK


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "layouts").glob("*.json")))
def test_each_example_is_in_order_with_itself(path: Path) -> None:
    assert worst(list(pair.check(side("producer", path), side("consumer", path)))) is Severity.OK


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"model": "large"}, "model", ("small 2xfull", "large 2xfull")),
        ({"dtype": "bfloat16"}, "KV cache dtype", ("float16", "bfloat16")),
        ({"head_size": 16}, "model", ("(4x8)", "(4x16)")),
        ({"layout": "cpu-vec"}, "encoding", ("float16", "cpu-vec")),
    ],
)
def test_what_must_agree_is_named_with_both_values(
    tmp_path: Path, changes: Mapping[str, object], field: str, values: tuple[str, str]
) -> None:
    (broken,) = named(Severity.BREAKS, compared(tmp_path, **changes))
    ours, theirs = broken.split(" at the producer and ")
    assert field in broken
    assert values[0] in ours
    assert values[1] in theirs


def test_tensor_parallel_sizes_that_do_not_divide_are_named(tmp_path: Path) -> None:
    sides = [
        described(tmp_path, name, tp=tp, kv_heads=12)
        for name, tp in (("producer", 4), ("consumer", 6))
    ]
    (broken,) = named(Severity.BREAKS, list(pair.check(*sides)))
    assert "tensor-parallel size is 4 at the producer and 6 at the consumer" in broken


def test_differences_that_only_cost_are_notes_with_both_values(tmp_path: Path) -> None:
    said = compared(tmp_path, block_size=32, layout="NHD", tp=2)
    assert worst(said) is Severity.NOTE
    notes = " ".join(named(Severity.NOTE, said))
    assert "block sizes differ: 16 at the producer, 32 at the consumer" in notes
    assert "layouts differ: HND at the producer, NHD" in notes
    assert "tensor-parallel sizes differ: 1 at the producer, 2" in notes


def test_different_kinds_of_memory_are_a_note(tmp_path: Path) -> None:
    producer = described(tmp_path, "producer")
    hello = producer.ranks[0]
    regions = tuple(msgspec.structs.replace(each, memory="DRAM") for each in hello.regions)
    staged = replace(producer, ranks=(msgspec.structs.replace(hello, regions=regions),))
    said = list(pair.check(staged, described(tmp_path, "consumer")))
    (noted,) = named(Severity.NOTE, said)
    assert noted == ("The kinds of memory differ: DRAM at the producer, VRAM at the consumer.")


def test_a_rank_that_is_missing_breaks_serving_on_both_counts(tmp_path: Path) -> None:
    whole = described(tmp_path, "producer", tp=2)
    lacking = replace(whole, ranks=whole.ranks[:1])
    said = named(Severity.BREAKS, list(pair.check(lacking, described(tmp_path, "consumer", tp=2))))
    assert any("lacks pp0.tp1" in found for found in said)
    assert any(found.startswith("KV does not move: ranks") for found in said)


def test_a_rank_that_holds_other_heads_than_its_own_is_refused_as_it_would_write(
    tmp_path: Path,
) -> None:
    producer = described(tmp_path, "producer", tp=2)
    first, second = producer.ranks
    swapped = tuple(
        msgspec.structs.replace(hello, regions=other.regions)
        for hello, other in ((first, second), (second, first))
    )
    sides = replace(producer, ranks=swapped), described(tmp_path, "consumer")
    said = named(Severity.BREAKS, list(pair.check(*sides)))
    assert said[0] == (
        "KV does not move: heads of 0.0 (to move: range(0, 2)) is range(2, 4) at the producer and "
        "range(0, 4) at the consumer."
    )


def test_a_region_table_that_makes_no_sense_is_said_and_nothing_else_is_asked(
    tmp_path: Path,
) -> None:
    good = described(tmp_path, "producer")
    hello = good.ranks[0]
    torn = msgspec.structs.replace(hello.regions[0], head_first=7)
    bad = replace(good, ranks=(msgspec.structs.replace(hello, regions=(torn,)),))
    said = list(pair.check(bad, described(tmp_path, "consumer")))
    assert "makes no sense: region table: region of 0.0: heads" in named(Severity.BREAKS, said)[0]
    assert len(named(Severity.BREAKS, said)) == 1


# -- running -------------------------------------------------------------------------------------


def met(name: str, address: Address, seal: Seal | None = None) -> Side:
    return network.meet(name, address, seal or Seal(), 2.0)


def test_running_engines_are_met_and_compared() -> None:
    with engine("a") as producer, engine("b") as consumer:
        said = list(pair.check(met("producer", producer), met("consumer", consumer)))
    assert worst(said) is Severity.OK
    assert "engine a, protocol 4, model tiny" in said[0].found
    assert "blocks of 16 tokens" in said[0].found


def test_a_wrong_block_size_between_running_engines_is_named_with_both_values() -> None:
    with ExitStack() as stack:
        ends = [
            stack.enter_context(engine(name, tokens=tokens))
            for name, tokens in (("a", 16), ("b", 32))
        ]
        said = list(pair.check(met("producer", ends[0]), met("consumer", ends[1])))
    (broken,) = [each for each in said if each.severity is Severity.BREAKS]
    assert "is 16 at the producer and 32 at the consumer" in broken.found
    assert "--block-size" in broken.to_do


def test_an_engine_compared_with_itself_is_a_warning() -> None:
    with engine("a") as address:
        said = list(pair.check(met("producer", address), met("consumer", address)))
    assert named(Severity.WARNING, said) == ["Both sides are engine a."]


def test_a_pure_consumer_that_refuses_is_as_it_should_be() -> None:
    with engine("a") as producer, engine("b") as gone:
        pass
    with engine("a") as producer:
        said = list(pair.check(met("producer", producer), met("consumer", gone)))
    assert worst(said) is Severity.WARNING
    assert "kv_consumer has no side channel" in said[1].why
    assert "not compared" in said[-1].found


def test_a_producer_that_refuses_breaks_serving() -> None:
    with engine("a") as gone:
        pass
    assert worst(list(pair.check(met("producer", gone), None))) is Severity.BREAKS


def test_another_key_is_told_apart() -> None:
    with engine("a", seal=Seal(b"k" * 32)) as address:
        without = the_worst(list(pair.check(met("producer", address), None)))
        with_key = list(pair.check(met("producer", address, Seal(b"k" * 32)), None))
    with engine("b") as open_address:
        needless = the_worst(list(pair.check(met("b", open_address, Seal(b"k" * 32)), None)))
    assert needless.to_do.startswith("Leave --shared-key-file out")
    assert without.severity is Severity.BREAKS
    assert "--shared-key-file" in without.to_do
    assert worst(with_key) is Severity.OK


def test_an_engine_without_workers_is_not_ready() -> None:
    with engine("a", ranks=False) as address:
        broken = the_worst(list(pair.check(met("producer", address), None)))
    assert "knows none of its workers" in broken.found


def test_another_protocol_version_is_named_with_both() -> None:
    answer = b"\x09rest"
    with _answering(len(answer).to_bytes(4, "big") + answer) as address:
        broken = the_worst(list(pair.check(met("producer", address), None)))
    assert "protocol version 9, ours is 4" in broken.found
    assert broken.to_do == "Install the same kvflow for both engines, and here."


@contextmanager
def _answering(data: bytes) -> Iterator[Address]:
    """A server that says `data` to everybody."""
    with socket.create_server(HERE) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    while connection.recv(4096):
                        connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address(*server.getsockname())
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5.0)
