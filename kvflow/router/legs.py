"""What the two legs of a request say, and which requests have no legs. Pure.

The prefill leg is the request itself with one token to compute; the decode leg is the request
itself. So both see the same prompt after any template, which is what makes their KV the same.
"""

from collections.abc import Mapping
from typing import Any

from kvflow.ids import Address, TransferId

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)
RANK_HEADER = "x-data-parallel-rank"
"""vLLM's name for: by which of the data-parallel engines."""

Body = Mapping[str, Any]
"""A request of the OpenAI API, decoded: ours only to pass on, so its keys are not typed here."""

_ONE_ONLY = ("n", "best_of", "num_beams")
_NEEDS_PROMPT_COMPUTED = ("prompt_logprobs", "echo")
_TEXT_PARTS = {"text", "refusal"}
_LENGTH_KEYS = ("max_completion_tokens", "min_tokens", "stream_options")


def why_local(path: str, body: Body) -> str | None:
    """Why a request has no legs, and is computed by one consumer alone; None if it has.

    Such an answer is right, only not disaggregated. The words are labels of a metric.
    """
    if any(isinstance(body.get(key), int) and body[key] > 1 for key in _ONE_ONLY):
        return "n"
    if body.get("use_beam_search"):
        return "beam_search"
    if any(body.get(key) is not None and body[key] is not False for key in _NEEDS_PROMPT_COMPUTED):
        return "prompt_logprobs"
    if path == COMPLETIONS:
        return _why_local_prompt(body)
    return None if all(map(_is_text, _messages(body))) else "multimodal"


def _why_local_prompt(body: Body) -> str | None:
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds"
    prompt = body.get("prompt")
    is_one = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    )
    is_only = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list)
    return None if is_one or is_only else "several_prompts"


def _messages(body: Body) -> list[Any]:
    messages = body.get("messages")
    return messages if isinstance(messages, list) else []


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return True
    return all(isinstance(p, str) or _part_type(p) in _TEXT_PARTS for p in content)


def _part_type(part: Any) -> Any:
    return part.get("type", "text") if isinstance(part, Mapping) else None


def prefill_leg(body: Body, transfer_id: TransferId) -> dict[str, Any]:
    """One token, not streamed, and the KV kept for `transfer_id`."""
    rest = {key: value for key, value in body.items() if key not in _LENGTH_KEYS}
    if "max_completion_tokens" in body:
        rest["max_completion_tokens"] = 1
    return {
        **rest,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer_id},
    }


def decode_leg(
    body: Body, transfer_id: TransferId, address: Address, passed_on: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole request, with the KV from the producer whose side channel is at `address`.

    passed_on  `kv_transfer_params` of the prefill leg's answer; empty if it is not known yet.
    """
    return {
        **body,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "remote_host": address.host,
            "remote_port": address.port,
            **passed_on,
            "transfer_id": transfer_id,
        },
    }


def local(body: Body) -> dict[str, Any]:
    """The request without legs. A client's own `kv_transfer_params` go nowhere: ids are secrets."""
    return {key: value for key, value in body.items() if key != "kv_transfer_params"}


def head(path: str, body: Body, size: int) -> bytes:
    """The beginning of a prompt, for prefix affinity: equal for prompts that begin alike.

    size  in characters of text, or in token ids.
    """
    if path == COMPLETIONS:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        return repr(prompt[:size] if isinstance(prompt, str | list) else prompt).encode()
    text: list[str] = []
    room = size
    for message in _messages(body):
        if room <= 0:
            break
        said = repr(message)[:room]
        text.append(said)
        room -= len(said)
    return "".join(text).encode()


def size(path: str, body: Body) -> int:
    """About how many tokens a prompt has: ids are counted, four characters taken for one."""
    prompt = body.get("prompt") if path == COMPLETIONS else body.get("messages")
    if isinstance(prompt, str):
        return len(prompt) // 4 + 1
    if not isinstance(prompt, list):
        return 1
    if prompt and isinstance(prompt[0], int):
        return len(prompt)
    return sum(len(part) if _is_ids(part) else len(repr(part)) // 4 for part in prompt) + 1


def _is_ids(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and isinstance(part[0], int)
