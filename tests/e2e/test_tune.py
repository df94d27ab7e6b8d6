"""`slipway tune` with real services: the demo with one request at a time, and with several."""

import json
import time

import yaml

from appliance.cli.main import main
from tests.e2e.conftest import ROOT


def test_tune_runs_the_candidates_and_continues_from_its_results(tmp_path, capsys):
    out, results = tmp_path / "best.yaml", tmp_path / "results.jsonl"
    command = ["tune", str(ROOT / "manifests" / "demo.yaml"), "--set", "engine.scheduling.max_running=1", "--only-keys"]
    command += ["--key", "engine.scheduling.max_running=4", "-n", "12", "-C", "4", "--runs", "1", "--json"]
    command += ["--input-tokens", "8", "--output-tokens", "24", "--output-spread", "0"]
    command += ["--slo", "ttft=60s", "-o", str(out), "--results", str(results)]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    best, base = found["candidates"]
    assert found["best"] == best["settings"] == {"engine.scheduling.max_running": "4"} and base["settings"] == {}
    for one in (best, base):
        (measured,) = one["measured"]
        assert measured["requests"] == 12 and not measured["failures"] and measured["attainment"] == 1
        assert measured["output_tokens"] == 12 * 24 == one["predicted"]["output_tokens"]
    # The prediction for the manifest is corrected by its own run.
    predicted, measured = (one["time_to_first_token_ms"]["p50"] for one in (base["predicted"], base["measured"][0]))
    assert abs(predicted / measured - 1) < 0.2
    assert yaml.safe_load(out.read_text()) == {"apiVersion": "slipway/v2", "engine": {"scheduling": {"max_running": 4}}}
    assert "measured" in out.read_text() and "predicted" in out.read_text()
    began = time.monotonic()
    assert main(command) == 0
    assert time.monotonic() - began < 20, "nothing is measured again"
    shown = capsys.readouterr()
    assert json.loads(shown.out) == found and "results of" in shown.err
