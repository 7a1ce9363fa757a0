"""What is installed, against what kvflow supports."""

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from kvflow.doctor.facts import Packages
from kvflow.doctor.findings import Finding, breaks, ok, warning

NIXL_BUILDS = ("nixl-cu12", "nixl-cu13", "nixl-rocm")
_UNKNOWN = "(which versions is not known here)"
INSTALL_NIXL = "pip install 'kvflow[nixl]'"


def check(packages: Packages) -> Iterator[Finding]:
    """Python, kvflow's own requirements, NIXL, vLLM."""
    if not packages.wanted:
        yield warning(
            f"kvflow {packages.installed['kvflow']} is not installed as a package here.",
            "Which versions it needs stands in a package's metadata: they are not compared.",
            "pip install kvflow, or pip install -e . in its directory.",
        )
    yield _python(packages)
    yield from _required(packages)
    yield _nixl(packages)
    yield _vllm(packages)


def has_nixl(packages: Packages) -> bool:
    """Whether both halves of NIXL are there: the Python package and a build."""
    return "nixl" in packages.installed and bool(_builds(packages))


def _python(packages: Packages) -> Finding:
    found = f"Python {packages.python}, kvflow {packages.installed['kvflow']}."
    if _fits(packages.python, packages.python_wanted):
        return ok(found, f"kvflow needs Python {packages.python_wanted or _UNKNOWN}.")
    return breaks(
        found,
        f"kvflow is written for Python {packages.python_wanted}.",
        f"Install it into an environment of Python {packages.python_wanted}.",
    )


def _required(packages: Packages) -> Iterator[Finding]:
    fitting = []
    for name in packages.required:
        wanted, version = packages.wanted[name], packages.installed.get(name)
        if version is not None and _fits(version, wanted):
            fitting.append(f"{name} {version}")
            continue
        yield breaks(
            f"{name} {version} is installed." if version else f"{name} is not installed.",
            f"kvflow needs {name}{wanted}, and does not start, or does not run rightly, without.",
            f"pip install '{name}{wanted}'",
        )
    if fitting:
        yield ok(f"{', '.join(fitting)}.", "All of them are within what kvflow needs.")


def _nixl(packages: Packages) -> Finding:
    builds = _builds(packages)
    if not has_nixl(packages):
        there = [
            f"{name} {packages.installed[name]}"
            for name in ("nixl", *builds)
            if name in packages.installed
        ]
        lacking = "nixl" if builds else "a build (nixl-cu12 or nixl-cu13)"
        found = (
            f"NIXL is not whole: {there[0]} is installed, but not {lacking}."
            if there
            else "NIXL is not installed."
        )
        return breaks(
            found,
            "kvflow moves KV by NIXL and by nothing else: an engine with it ends at start.",
            f"{INSTALL_NIXL}",
        )
    names = ("nixl", *builds)
    versions = {packages.installed[name] for name in names}
    found = f"NIXL: {', '.join(f'{name} {packages.installed[name]}' for name in names)}."
    wanted = packages.wanted.get("nixl", "")
    if len(versions) > 1:
        return warning(
            found,
            "The Python package and the build are of different versions, and call each other.",
            f"{INSTALL_NIXL}",
        )
    if not all(_fits(version, wanted) for version in versions):
        return warning(
            found,
            f"kvflow is tested with NIXL {wanted}: what it knows of NIXL's behaviour is of that.",
            f"{INSTALL_NIXL}",
        )
    return ok(found, f"kvflow is tested with NIXL {wanted or _UNKNOWN}.")


def _vllm(packages: Packages) -> Finding:
    wanted = packages.wanted.get("vllm", "")
    if not packages.vllm:
        return warning(
            "vLLM is not installed in this environment.",
            "An engine needs it beside kvflow; that the engines' own environment has it cannot be "
            "seen from here.",
            f"Run kvflow doctor in the engines' environment (vLLM {wanted or _UNKNOWN}).",
        )
    version = packages.installed[packages.vllm]
    torch = packages.installed.get("torch")
    found = f"{packages.vllm} {version}{f', torch {torch}' if torch else ''}."
    if _fits(version, wanted):
        return ok(found, f"kvflow supports vLLM {wanted or _UNKNOWN}.")
    return breaks(
        found,
        f"kvflow is written against the connector interface of vLLM {wanted}, which changes "
        "between versions.",
        f"pip install 'vllm{wanted}'",
    )


def _builds(packages: Packages) -> list[str]:
    return [name for name in NIXL_BUILDS if name in packages.installed]


def _fits(version: str, wanted: str) -> bool:
    return SpecifierSet(wanted).contains(version, prereleases=True)
