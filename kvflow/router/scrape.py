"""What an engine says of itself on `/metrics`."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

USAGE = "vllm:kv_cache_usage_perc"
COMPUTED = "vllm:prompt_tokens_by_source_total"
COMPUTED_HERE = "local_compute"


def samples(text: str, name: str, **labels: str) -> Iterator[float]:
    """The values of all samples with that name and those labels. Raises `ValueError`.

    Only their lines are parsed: an engine's page is long, and requests wait meanwhile.
    """
    lines = "\n".join(line for line in text.splitlines() if line.startswith(name + "{"))
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                yield sample.value
