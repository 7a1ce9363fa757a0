"""Makes tiny models with random weights and a byte-level tokenizer; nothing is fetched.

The weights are drawn wide (`initializer_range=0.3`), so that greedy tokens depend on the whole
context: a token that differs from the monolithic run's means that KV was lost or mixed up. The
default model has 4 layers x 8 KV heads x 64 in float32: one token's KV is 16 KiB. The others are
those of `kvflow.demo.families`.

A model is kept under a key of its contents: the recipe and the versions of the packages that draw
the weights. It is written beside its place and renamed there, so that a reader never
sees half of it and two makers do no harm.

Known limit: the weights of one seed may differ between processors; engines that are compared must
read the same directory.
"""

import hashlib
import importlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvflow.demo.families import END_OF_TEXT, FAMILIES, Family

_SEED = 20251

PROMPT_TOKEN_IDS = range(256)
"""Token ids that may stand in a prompt: every byte."""


def model_cache_directory() -> Path:
    """Where models are kept unless a caller says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvflow" / "models"


def tiny_model(directory: Path | None = None, *, family: str = "qwen3") -> Path:
    """The path of a family's tiny model under `directory`; makes it if it is not there."""
    base = model_cache_directory() if directory is None else directory
    recipe = FAMILIES[family]
    place = base / f"{family}-tiny-{_content_key(recipe)}"
    if not place.is_dir():
        _publish(place, partial(_write_model, recipe))
    return place


def _content_key(family: Family) -> str:
    """Names the recipe: what is drawn, and what draws and writes it."""
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")
    }
    recipe = {
        "layout": 2,
        "seed": _SEED,
        "architecture": family.architecture,
        "config": family.whole_config,
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _publish(place: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a directory beside `place`, and renames it there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        write(draft)
        draft.chmod(0o755)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():  # else another maker was first; its contents are the same
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_model(family: Family, directory: Path) -> None:
    # Imported here: torch and transformers take seconds, and a model that is kept needs neither.
    torch, transformers = _untyped("torch"), _untyped("transformers")
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        config = getattr(transformers, family.config_class)(**family.whole_config)
        model = getattr(transformers, family.architecture)(config)
    model.to(torch.float32).save_pretrained(directory)
    _write_tokenizer(directory)


def _write_tokenizer(directory: Path) -> None:
    """A tokenizer of the 256 byte symbols, without merges, and one end-of-text token."""
    tokenizers, transformers = _untyped("tokenizers"), _untyped("transformers")
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(symbols)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    assert tokenizer.token_to_id("<|end|>") == END_OF_TEXT
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        bos_token="<|end|>",
        pad_token="<|end|>",
    ).save_pretrained(directory)


def _untyped(module: str) -> Any:
    """Imports a library without its types: following these takes mypy minutes."""
    return importlib.import_module(module)
