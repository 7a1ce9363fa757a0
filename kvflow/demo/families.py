"""The model families of which a tiny model can be made, and what an engine needs to serve each.

One line per family and one reason to have it: together they have every kind of KV cache group that
vLLM's CPU build can run. Shapes are as small as vLLM's CPU kernels take.

- One group of full attention: `qwen3`, `qwen3_moe`. `mistral` also is one group, of sliding
  windows.
- Two and three groups of full and sliding-window attention: `gpt_oss`, `gemma3`.
- Three groups of Mamba layers and one of full attention: `granite_moe_hybrid`.
- Latent attention (MLA), where a token has one vector for all heads: `deepseek_v2`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

ConfigValue: TypeAlias = int | float | bool | str | list[int] | list[str] | None

END_OF_TEXT = 256
"""The token id after the 256 bytes."""
SLIDING_WINDOW_TOKENS = 128

_COMMON: Mapping[str, ConfigValue] = {
    "vocab_size": 264,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "eos_token_id": END_OF_TEXT,
    "bos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
    "dtype": "float32",
}
_ATTENTION: Mapping[str, ConfigValue] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: how its model is made, and what serves it.

    architecture  transformers' model class.
    config_class  transformers' class of its configuration.
    config        what the configuration says beside `_COMMON`.
    engine_env    environment variables that an engine needs.
    engine_args   arguments that an engine needs.
    """

    architecture: str
    config_class: str
    config: Mapping[str, ConfigValue]
    engine_env: Mapping[str, str] = field(default_factory=dict)
    engine_args: tuple[str, ...] = ()

    @property
    def whole_config(self) -> dict[str, ConfigValue]:
        return {**_COMMON, **self.config}


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        config_class="Qwen3Config",
        config={**_ATTENTION, "num_key_value_heads": 8, "num_hidden_layers": 4},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        config_class="Qwen3MoeConfig",
        config={
            **_ATTENTION,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        config_class="Gemma3TextConfig",
        config={
            **_ATTENTION,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 64,
            "sliding_window": SLIDING_WINDOW_TOKENS,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        config_class="GptOssConfig",
        config={
            **_ATTENTION,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "sliding_window": SLIDING_WINDOW_TOKENS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        config_class="MistralConfig",
        config={
            **_ATTENTION,
            "num_hidden_layers": 4,
            "sliding_window": SLIDING_WINDOW_TOKENS,
        },
    ),
    "granite_moe_hybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        config_class="GraniteMoeHybridConfig",
        config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
            "position_embedding_type": "rope",
        },
        # The layout of the convolution's state that can be cut along its heads.
        engine_env={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        config_class="DeepseekV2Config",
        config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        # The plain kernels, on every machine. vLLM then sets blocks of 16 tokens by itself, and
        # switches prefix caching and chunked prefill off.
        engine_args=("--attention-backend", "CPU_MLA"),
    ),
}
