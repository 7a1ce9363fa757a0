"""What the connector tells its worker about vLLM's configuration."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from kvflow.connector.supported import prompt_tokens_max

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
