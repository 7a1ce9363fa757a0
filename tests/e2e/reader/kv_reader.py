"""Reads KV caches from inside of a worker: for `--worker-extension-cls kv_reader.KVReader`.

With `VLLM_SERVER_DEV_MODE=1` an engine's `/collective_rpc` calls these methods in every worker;
arguments are strings, answers JSON. A directory with this file alone is on the engine's PYTHONPATH.
"""

import hashlib
import json
from typing import Any


class KVReader:
    """Mixed into vLLM's worker class; for models with one group of plain rows, as MLA has."""

    model_runner: Any

    def kv_of_running(self, prompt: str) -> list[list[str]]:
        """Like `kv_of_blocks`, of the request that runs with this prompt; empty without one.

        The last token's bytes are left out.
        """
        wanted = json.loads(prompt)
        for request in self.model_runner.requests.values():
            if request.prompt_token_ids == wanted:
                return self.kv_of_blocks(json.dumps(request.block_ids[0]), str(len(wanted) - 1))
        return []

    def kv_of_blocks(self, blocks: str, tokens: str) -> list[list[str]]:
        """Per layer, one digest per block of the first so many tokens' bytes."""
        return [
            _digests(cache, json.loads(blocks), int(tokens))
            for cache in self.model_runner.kv_caches
        ]


def _digests(cache: Any, blocks: list[int], tokens: int) -> list[str]:
    per_block = cache.shape[2]  # (blocks, heads, tokens, values)
    digests = []
    for number, first in enumerate(range(0, tokens, per_block)):
        rows = cache[blocks[number], :, : tokens - first]
        digests.append(hashlib.sha256(rows.numpy().tobytes()).hexdigest())
    return digests
