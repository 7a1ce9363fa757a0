"""The Grafana dashboard, and documents, name metrics that there are, by labels that they have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvflow.observe.metrics import BY_NAME, METRICS, Metric

DASHBOARD = Path(__file__).resolve().parent.parent / "examples" / "grafana" / "kvflow.json"
VLLM_LABELS = {"model_name", "engine", "instance", "rank", "le"}
_SERIES = re.compile(r"(kvflow_\w+)\{([^}]*)\}")
_BY = re.compile(r"by \(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return loaded


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", []):
            yield target["expr"]


def metric_of(series: str) -> Metric:
    """Of a histogram there are three series."""
    if series in BY_NAME:
        return BY_NAME[series]
    base = re.sub(r"_(bucket|count|sum)$", "", series)
    assert BY_NAME[base].kind == "histogram", series
    return BY_NAME[base]


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_names_metrics_and_labels_that_there_are(expression: str) -> None:
    found = _SERIES.findall(expression)
    assert found
    labels = VLLM_LABELS | {label for series, _ in found for label in metric_of(series).labels}
    for series, matchers in found:
        metric = metric_of(series)
        own = VLLM_LABELS | set(metric.labels)
        assert {each.split("=")[0].rstrip("!") for each in matchers.split(",")} <= own
        if metric.kind == "counter" and not expression.startswith("sum by (instance, machine)"):
            assert re.search(rf"(rate|increase)\({series}", expression), "a counter only grows"
    for names in _BY.findall(expression):
        assert {name.strip() for name in names.split(",")} <= labels
    assert expression.count("(") == expression.count(")")


def test_every_metric_is_on_the_dashboard() -> None:
    asked = {
        metric_of(series).name for each in expressions() for series, _ in _SERIES.findall(each)
    }
    assert asked == {metric.name for metric in METRICS}


def test_it_has_what_grafana_needs_to_load_it() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert {"title", "uid", "schemaVersion", "templating", "time", "panels"} <= dashboard.keys()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    text = DASHBOARD.read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{?(\w+)\}?", text)) - {"__rate_interval", "__all"}
    assert used == variables


def test_panels_lie_within_the_grid_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


DOCUMENTS = ("specs/operating.md", "specs/troubleshooting.md", "specs/metrics.md", "README.md")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_metrics_and_labels_that_there_are(name: str) -> None:
    text = (DASHBOARD.parents[2] / name).read_text(encoding="utf-8")
    for series, matchers in re.findall(r"(kvflow_(?!router)\w+)(?:\{([^}]*)\})?", text):
        metric = metric_of(series)
        own = VLLM_LABELS | set(metric.labels)
        assert set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", matchers)) <= own
