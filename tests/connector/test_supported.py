"""What is moved and what is refused at start, with the sentence that an operator reads."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvflow.connector.groups import groups_of, transferred
from kvflow.connector.supported import check_supported, excluded_layers, prompt_tokens_max
from kvflow.errors import ConfigurationError

LENGTH = 1024


def check_prompt(tokens: int) -> None:
    """As vLLM checks a prompt before its engine hears of it."""
    server: Any = SimpleNamespace(
        skip_prompt_length_check=False,
        supports_mm_inputs=False,
        mm_encoder_cache_size=0,
        model_config=SimpleNamespace(max_model_len=LENGTH, runner_type="generate"),
    )
    InputProcessor._validate_prompt_len(server, tokens, "decoder")


def test_the_longest_prompt_is_the_longest_that_vllm_takes_f1() -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LENGTH))
    most = prompt_tokens_max(config)
    check_prompt(most)
    with pytest.raises(VLLMValidationError, match="maximum model length"):
        check_prompt(most + 1)


# -- what is refused at start ----------------------------------------------------------------------

ATTENTION = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**ATTENTION)
WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=128)
LATENT = MLAAttentionSpec(**ATTENTION)
STATE = MambaSpec(block_size=4096, shapes=((4, 8),), dtypes=(torch.float32,))


def engine(**changes: Any) -> Any:
    """A configuration of vLLM, as far as it is looked at."""
    sizes = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**sizes, **changes}),
        num_prefill_lookahead_tokens=changes.get("lookahead", 0),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
    )


def caches(*specs: Any, **group: Any) -> KVCacheConfig:
    """One cache group of one layer for each specification."""
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=[f"layer.{nth}"], kv_cache_spec=spec, **group)
            for nth, spec in enumerate(specs)
        ],
    )


@pytest.mark.parametrize(
    "specs", [(FULL,), (WINDOW,), (LATENT,), (WINDOW, WINDOW, FULL), (STATE, STATE, FULL)]
)
def test_these_kinds_of_groups_are_moved(specs: tuple[Any, ...]) -> None:
    check_supported(engine(), caches(*specs))


def test_a_group_that_keeps_one_specification_per_layer_is_looked_into() -> None:
    mixed = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer.0": FULL})
    check_supported(engine(), caches(mixed))
    quantized = FullAttentionSpec(**ATTENTION, kv_quant_mode=KVQuantMode.NVFP4)
    refused = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer.0": quantized})
    with pytest.raises(ConfigurationError, match="kv_cache_dtype"):
        check_supported(engine(), caches(refused))


KINDS = "one of FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec, MambaSpec"
REFUSED = [
    (
        {"prefill_context_parallel_size": 2},
        (FULL,),
        "prefill_context_parallel_size=2 is not allowed; allowed: 1; kvflow moves no part of it",
    ),
    (
        {"decode_context_parallel_size": 4},
        (FULL,),
        "decode_context_parallel_size=4 is not allowed; allowed: 1; kvflow moves no part of it",
    ),
    (
        {"lookahead": 3},
        (FULL,),
        "num_speculative_tokens=3 is not allowed; allowed: "
        "drafters that look ahead by one token of a prompt",
    ),
    (
        {},
        (FULL, ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)),
        f"KV cache of cache group 1='ChunkedLocalAttentionSpec' is not allowed; allowed: {KINDS}",
    ),
    (
        {},
        (SinkFullAttentionSpec(**ATTENTION, sink_len=4),),
        f"KV cache of cache group 0='SinkFullAttentionSpec' is not allowed; allowed: {KINDS}",
    ),
    (
        {},
        (SlidingWindowMLASpec(**ATTENTION, sliding_window=128),),
        f"KV cache of cache group 0='SlidingWindowMLASpec' is not allowed; allowed: {KINDS}",
    ),
    (
        {},
        (CrossAttentionSpec(**ATTENTION),),
        f"KV cache of cache group 0='CrossAttentionSpec' is not allowed; allowed: {KINDS}",
    ),
    (
        {},
        (MambaSpec(4096, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align"),),
        "mamba_cache_mode='align' is not allowed; allowed: \"none\" "
        "(vLLM chooses it without prefix caching: --no-enable-prefix-caching)",
    ),
    (
        {},
        (MLAAttentionSpec(**ATTENTION, tokens_per_state=4),),
        "tokens per state of cache group 0=4 is not allowed; allowed: 1",
    ),
    (
        {"cache_dtype": "int8_per_token_head"},
        (FullAttentionSpec(**ATTENTION, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),),
        "kv_cache_dtype='int8_per_token_head' is not allowed; "
        "allowed: no scales inside of the cache",
    ),
]


@pytest.mark.parametrize(("changes", "specs", "sentence"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_is_refused_at_start_is_named_f14(
    changes: dict[str, Any], specs: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_supported(engine(**changes), caches(*specs))
    assert str(raised.value) == sentence


def test_a_group_in_host_memory_is_refused_by_name_f14() -> None:
    with pytest.raises(ConfigurationError, match="cache group 0='in host memory'"):
        check_supported(engine(), caches(FULL, host_resident=True))


# -- what is left out ------------------------------------------------------------------------------


def test_a_drafters_group_and_what_vllm_makes_anew_are_left_out_and_named() -> None:
    config = caches(FULL, FULL, WINDOW)
    config.kv_cache_groups[1].is_eagle_group = True
    assert transferred(config) == (0, 2)
    assert [group.index for group in groups_of(config)] == [0, 2]
    assert excluded_layers(config) == ["layer.1"]
    config.kv_cache_groups[2].enable_kv_transfer = False
    assert excluded_layers(config) == ["layer.1", "layer.2"]
