"""`kvflow bench serve` with real engines: one connector, one rate, one length."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TIMEOUT_S = 280.0
SERVE = [sys.executable, "-c", "from kvflow.cli import main; main()", "bench", "serve"]
REQUESTS = 4
PROMPT_TOKENS = 256
KV_BYTES = PROMPT_TOKENS * 16 * 1024
"""Of the tiny model: 16 KiB a token."""


def test_a_run_measures_every_figure_and_all_tokens_are_right(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    extent = ("--connectors", "kvflow-push", "--rates", "2", "--lengths", str(PROMPT_TOKENS))
    amount = ("--requests", str(REQUESTS), "--repeats", "1", "--output-tokens", "8")
    ran = subprocess.run(
        [*SERVE, *extent, *amount, "--json", str(path), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"bench serve: {REQUESTS}/{REQUESTS} requests token-identical, 0 failed" in ran.stdout
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["ok"]
    assert result["problems"] == []
    assert result["machine"]["cores"] >= 1
    assert result["versions"]["kvflow"]
    assert result["set_ups"][0]["transfer_config"]["kv_connector"] == "KVFlowConnector"
    (point,) = result["points"]
    assert (point["connector"], point["dispatch"]) == ("kvflow-push", "concurrent")
    assert (point["rate"], point["length"], point["round"]) == (2.0, PROMPT_TOKENS, 1)
    assert point["kv_bytes"] == KV_BYTES
    assert point["consumer_computed_tokens"] == 0
    assert len(point["requests"]) == REQUESTS
    for request in point["requests"]:
        assert request["error"] is None
        assert request["mismatch"] is None
        assert request["output_tokens"] == 8
        assert request["kv_bytes"] == KV_BYTES
        assert request["kv_descriptors"] >= 1
        assert 0 < request["ttft_ms"] < request["total_ms"]
        assert request["tpot_ms"] > 0
    (row,) = result["summary"]
    unknown = [name for name, value in row["figures"].items() if value is None]
    assert unknown == []
    assert (row["right"], row["failed"], row["mismatched"]) == (REQUESTS, 0, 0)
    assert result["ratios"] == []
