"""The tiny models: one of each family, made once, readable by what will read it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="it makes the models")

from kvflow.demo.families import FAMILIES
from kvflow.demo.model import tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_its_familys_shape_weights_and_a_tokenizer(
    directory: Path, family: str
) -> None:
    model = tiny_model(directory, family=family)
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[family].architecture]
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "initializer_range"):
        assert config[key] == FAMILIES[family].whole_config[key]
    assert (model / "model.safetensors").stat().st_size > 100_000
    assert (model / "tokenizer.json").is_file()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_made_once(directory: Path, family: str) -> None:
    first = tiny_model(directory, family=family)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny_model(directory, family=family) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made


def test_each_family_has_a_place_of_its_own(directory: Path) -> None:
    places = {tiny_model(directory, family=family) for family in FAMILIES}
    assert len(places) == len(FAMILIES)
    assert {path for path in directory.iterdir() if not path.name.startswith(".")} == places


def test_the_same_recipe_draws_the_same_weights(directory: Path, tmp_path: Path) -> None:
    one, other = tiny_model(directory), tiny_model(tmp_path)
    assert one.name == other.name
    weights = [path / "model.safetensors" for path in (one, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
