"""The rules of the house that a machine can check: who may import what, sizes, names, paths."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FILE_LINES_MAX = 420
FUNCTION_LINES_MAX = 75
LINE_CHARS_MAX = 100

# Where a broad `except` turns whatever was raised into an event, or into a doctor's finding.
BROAD_EXCEPT_ALLOWED = {
    "kvflow/io/driver.py",
    "kvflow/io/thread.py",
    "kvflow/doctor/examine.py",
}
EVERYTHING = {"Exception", "BaseException"}
NAMES_AVOIDED = ("utils", "helpers", "manager")
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
# Packages that only some files may import at all.
GUARDED = {
    "nixl": ("kvflow/io/nixl_port.py", "kvflow/bench/transfer_ways.py"),
    "nixl_cu12": (),
    "nixl_cu13": (),
    "vllm": ("kvflow/connector/", "kvflow/bench/core_hooks.py"),
    "torch": ("kvflow/connector/", "kvflow/demo/model.py"),
}
HEAVY = {"vllm", "torch", "nixl", "nixl_cu12", "asyncio", "logging"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What the files of one layer may import besides the standard library.

    own        parts of kvflow.
    others     third parties.
    not_these  modules of the standard library that they may not.
    lazily     third parties that may be imported inside functions only.
    """

    own: frozenset[str]
    others: frozenset[str] = frozenset()
    not_these: frozenset[str] = frozenset()
    lazily: frozenset[str] = frozenset()


# A package or file of kvflow that is not here may import any part of it.
LAYERS = {
    "errors": Layer(own=frozenset()),
    "ids": Layer(own=frozenset({"errors"})),
    "core": Layer(
        own=frozenset({"errors", "ids", "core"}),
        not_these=frozenset({"asyncio", "threading", "socket", "logging", "time", "random"}),
        lazily=frozenset({"transitions"}),
    ),
    "layout": Layer(own=frozenset({"errors", "ids", "layout"}), others=frozenset({"numpy"})),
    "wire": Layer(own=frozenset({"core", "ids", "errors", "wire"}), others=frozenset({"msgspec"})),
    "io": Layer(
        own=frozenset({"core", "layout", "wire", "ids", "errors", "observe", "settings", "io"}),
        others=frozenset({"numpy", "msgspec", "uvloop", "structlog", "nixl"}),
    ),
    "connector": Layer(
        own=frozenset(
            {"io", "core", "layout", "observe", "settings", "ids", "errors", "connector"}
        ),
        others=frozenset({"numpy", "msgspec", "structlog", "torch", "vllm", "prometheus_client"}),
    ),
    "diagrams": Layer(
        own=frozenset({"core", "observe", "tracing", "errors", "diagrams"}),
        others=frozenset({"typer"}),
    ),
    "router": Layer(
        own=frozenset({"router", "io", "wire", "ids", "errors"}),
        others=frozenset({"aiohttp", "msgspec", "structlog", "starlette", "uvicorn", "uvloop"})
        | frozenset({"prometheus_client"}),
        lazily=frozenset({"yaml"}),
    ),
    "live": Layer(
        own=frozenset({"live", "io", "wire", "ids", "errors"}),
        others=frozenset({"msgspec", "rich", "typer"}),
    ),
    "doctor": Layer(
        own=frozenset({"doctor", "planning", "settings", "io", "core", "layout", "wire"})
        | frozenset({"ids", "errors"}),
        others=frozenset({"httpx", "msgspec", "numpy", "packaging", "rich", "typer"}),
        lazily=frozenset({"psutil"}),
    ),
    "tracing": Layer(
        own=frozenset({"tracing", "observe", "core", "ids", "errors"}),
        others=frozenset({"msgspec", "rich", "typer"}),
        not_these=frozenset({"asyncio", "threading", "socket", "time", "random"}),
    ),
    # Only the benchmark of vLLM's hooks needs the connector, and vLLM; the others see of it what an
    # operator does.
    "bench": Layer(
        own=frozenset({"bench", "connector", "demo", "testing", "planning", "observe", "settings"})
        | frozenset({"io", "core", "layout", "wire", "ids", "errors"}),
        others=frozenset({"aiohttp", "msgspec", "numpy", "rich", "typer"}),
        lazily=frozenset({"matplotlib", "nixl", "vllm"}),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module. `lazy`: not run when the importing module is."""

    module: str
    line: int
    lazy: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def imports_of(source: str, path: str) -> Iterator[Import]:
    """Every import in `source`; relative ones made absolute by `path`."""
    package = path.removesuffix(".py").split("/")[:-1]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=alias.name, line=node.lineno, lazy=lazy)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                # `from kvflow import io` imports kvflow.io.
                name = f"{module}.{alias.name}" if module == "kvflow" else module
                yield Import(module=name, line=node.lineno, lazy=lazy)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for field, value in ast.iter_fields(node):
            typing_only = (
                isinstance(node, ast.If)
                and field == "body"
                and ast.unparse(node.test).endswith("TYPE_CHECKING")
            )
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, lazy or inside or typing_only)

    yield from visit(ast.parse(source), False)


def import_faults(source: str, path: str) -> list[str]:
    """What `source`, lying at `path`, imports against the rules."""
    layer = LAYERS.get(path.split("/")[1].removesuffix(".py"))
    faults = []
    for each in imports_of(source, path):
        fault = _fault(each, path, layer)
        if fault:
            faults.append(f"{path}:{each.line}: {each.module}: {fault}")
    return faults


def _fault(each: Import, path: str, layer: Layer | None) -> str | None:
    if each.top in PICKLES:
        return "no pickle anywhere"
    if each.top in GUARDED and not path.startswith(GUARDED[each.top] or ("(nobody)",)):
        return f"only for {', '.join(GUARDED[each.top]) or 'nobody'}"
    if layer is None:
        return None
    if each.top == "kvflow":
        part = each.module.split(".")[1] if "." in each.module else "__init__"
        allowed = part in layer.own or part == "__version__"
        return None if allowed else "not for this layer"
    if each.top in sys.stdlib_module_names:
        return "not for this layer" if each.top in layer.not_these else None
    if each.top in layer.lazily:
        return None if each.lazy else "only inside a function"
    return None if each.top in layer.others else "not for this layer"


def broad_excepts(source: str) -> list[int]:
    """Lines that catch everything: `except Exception`, a bare one, or `suppress(Exception)`."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught = node.args
        else:
            continue
        if any(each is None or ast.unparse(each) in EVERYTHING for each in caught):
            lines.append(node.lineno)
    return lines


def in_git(*options: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kvflow").rglob("*.py"))
TESTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py"))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SOURCES)
def test_a_layer_imports_only_what_it_may(path: str) -> None:
    assert import_faults(read(path), path) == []


@pytest.mark.parametrize("path", sorted(set(SOURCES) - BROAD_EXCEPT_ALLOWED))
def test_nothing_is_caught_broadly(path: str) -> None:
    assert broad_excepts(read(path)) == []


@pytest.mark.parametrize("path", SOURCES + TESTS)
def test_files_functions_and_lines_are_short(path: str) -> None:
    lines = read(path).splitlines()
    assert len(lines) <= FILE_LINES_MAX
    assert [number for number, line in enumerate(lines, 1) if len(line) > LINE_CHARS_MAX] == []
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_no_file_is_named_after_nothing() -> None:
    named = [
        path for path in SOURCES + TESTS if any(word in path.lower() for word in NAMES_AVOIDED)
    ]
    assert named == []


def test_no_tracked_file_contains_a_path_of_the_machine_it_was_written_on() -> None:
    # A leading word character makes it part of a longer path ("frame/work/").
    machine_path = re.compile(rb"(?<![\w.-])/(?:work|root)/")
    this_file = Path(__file__).relative_to(ROOT).as_posix()
    found = [
        path
        for path in in_git()
        if path != this_file and machine_path.search((ROOT / path).read_bytes())
    ]
    assert found == []


@pytest.mark.parametrize("package", ["kvflow", "kvflow.core"])
def test_importing_is_light(package: str) -> None:
    assert (imported_by(f"import {package}") - imported_by("pass")) & HEAVY == set()


def imported_by(code: str) -> set[str]:
    """Top-level names of all modules that a new interpreter imports to run `code`."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    names = re.findall(r"^import time:.*\|\s*(\S+)$", ran.stderr, flags=re.MULTILINE)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize(
    ("path", "source", "faults"),
    [
        ("kvflow/core/engine.py", "import time", 1),
        ("kvflow/core/engine.py", "import transitions", 1),
        ("kvflow/core/engine.py", "def load():\n    import transitions", 0),
        ("kvflow/core/engine.py", "from kvflow.wire import messages", 1),
        ("kvflow/core/engine.py", "from kvflow import io, ids, __version__", 1),
        ("kvflow/core/engine.py", "from ..wire import messages\nfrom . import table", 1),
        ("kvflow/core/engine.py", "import heapq, kvflow.errors", 0),
        ("kvflow/core/engine.py", "import kvflow", 1),
        ("kvflow/layout/plan.py", "import numpy as np\nimport msgspec", 1),
        ("kvflow/wire/codec.py", "import pickle", 1),
        ("kvflow/io/driver.py", "from nixl._api import nixl_agent", 1),
        ("kvflow/io/nixl_port.py", "def load():\n    from nixl import _api", 0),
        ("kvflow/io/driver.py", "from kvflow.connector import facade", 1),
        ("kvflow/demo/serve.py", "if True:\n    import vllm.config", 1),
        ("kvflow/demo/model.py", "import torch, transformers", 0),
        ("kvflow/bench/report_png.py", "import matplotlib.figure", 1),
        ("kvflow/bench/report_png.py", "def draw():\n    import matplotlib.figure", 0),
        ("kvflow/bench/serve.py", "from kvflow.demo import engines", 0),
        ("kvflow/bench/serve.py", "from kvflow.router import app", 1),
        ("kvflow/connector/facade.py", "import torch, vllm\nfrom kvflow.wire import codec", 1),
        ("kvflow/doctor/network.py", "def ask():\n    import psutil", 0),
        ("kvflow/doctor/network.py", "import psutil", 1),
        ("kvflow/doctor/probes.py", "from kvflow.connector import supported", 1),
        ("kvflow/cli.py", "import typer\nfrom kvflow.demo import serve", 0),
    ],
)
def test_the_import_rules_bite(path: str, source: str, faults: int) -> None:
    assert len(import_faults(source, path)) == faults


def test_the_rule_on_broad_excepts_bites() -> None:
    source = """
try:
    pass
except (OSError, Exception):
    pass
with contextlib.suppress(BaseException):
    pass
try:
    pass
except:
    raise
try:
    pass
except OSError:
    pass
"""
    assert sorted(broad_excepts(source)) == [4, 6, 10]
