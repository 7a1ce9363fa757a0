"""What two engines compare a prompt by: equal for two requests with the same KV.

Rules: its tokens are in it, and the name of its adapter. What only says who may share the KV
(`cache_salt`) is not. No token can be read back from it.

Known limits: prompts that differ in their images or sounds alone are not told apart, since how
vLLM names those may differ between two engines; a prompt of embeddings has no token ids, hence no
digest.
"""

import hashlib
from array import array
from typing import TYPE_CHECKING

from kvflow.ids import NO_DIGEST, PromptDigest

if TYPE_CHECKING:
    from vllm.v1.request import Request

_BYTES = 16


def digest_of(request: "Request", tokens: int) -> PromptDigest:
    """Of the first `tokens` of its prompt."""
    if request.prompt_token_ids is None:
        return NO_DIGEST
    hashed = hashlib.blake2b(digest_size=_BYTES)
    hashed.update(array("q", request.prompt_token_ids[:tokens]))
    if request.lora_request is not None:
        hashed.update(request.lora_request.lora_name.encode())
    return PromptDigest(hashed.digest())
