"""Engines by their HTTP ports."""

from collections.abc import Iterator, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kvflow.doctor.facts import OpenAi
from kvflow.doctor.findings import Finding, breaks, ok, warning


def check(engines: Sequence[OpenAi], vllm_wanted: str) -> Iterator[Finding]:
    """Each by itself, then whether they serve the same."""
    for engine in engines:
        yield _engine(engine, vllm_wanted)
    served = {engine.models for engine in engines if engine.models}
    if len(served) > 1:
        yield breaks(
            "The engines serve different models: "
            f"{'; '.join(f'{each.url} {_models(each)}' for each in engines if each.models)}.",
            "KV of one model means nothing to another; kvflow refuses the pair.",
            "Start all engines of a pair with the same --model and --served-model-name.",
        )


def _engine(engine: OpenAi, wanted: str) -> Finding:
    if not engine.status:
        return breaks(
            f"{engine.url} does not answer: {engine.error}.",
            "The router cannot reach it either, if it is where this runs.",
            "See that the engine has started, and listens at this address (--host, --port).",
        )
    if not engine.version:
        return warning(
            f"{engine.url} answers {engine.error or f'HTTP {engine.status}'} to /version.",
            "That is no vLLM, or something stands before it.",
            "Give the engine's own URL.",
        )
    found = f"{engine.url}: vLLM {engine.version}, serves {_models(engine)}."
    try:
        fits = SpecifierSet(wanted).contains(Version(engine.version), prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        return warning(
            found,
            f"kvflow is written against the connector interface of vLLM {wanted}.",
            f"Run vLLM {wanted} there.",
        )
    return ok(found, f"kvflow supports vLLM {wanted}.")


def _models(engine: OpenAi) -> str:
    return ", ".join(engine.models) or "no model that it tells"
