"""`slipway tune` and `slipway eval --start` with services that they start: the demo."""

import json
import time

import yaml

from appliance.cli.main import main
from tests.appliance.certificates import write_certificate
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


def test_eval_starts_the_service_of_a_manifest_and_reports_each_task(tmp_path, capsys):
    """Accuracy, replies without an answer, a threshold; the service has no TLS; refused before anything starts."""
    write_certificate(tmp_path, "a")
    (tmp_path / "sum.jsonl").write_text(json.dumps({"question": "What is 17 + 25?", "regex": r"\S"}) + "\n")
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "Say hello.", "answer": "#### 123456"}) + "\n")
    path = tmp_path / "m.yaml"
    text = f"apiVersion: slipway/v2\nmodel: {{source: {{path: {ROOT / 'manifests/demo'}}}}}\n"
    text += "endpoints: {tls: {certificate: a.crt, key: a.key}}\nevaluation:\n"
    text += "  sum: {file: sum.jsonl, kind: exact_match, minimum: 0.9}\n"
    path.write_text(text + "  words: {file: gsm8k.jsonl, kind: gsm8k, minimum: 0.5}\n")
    assert main(["eval", str(path), "--start", "--json", "--max-tokens", "16"]) == 1
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert tasks["sum"]["accuracy"] == 1 and tasks["sum"]["passed"]
    assert tasks["words"]["accuracy"] == 0 and not tasks["words"]["passed"] and tasks["words"]["unparsed"] <= 1
    path.write_text(text.replace("minimum", "minimim"))
    assert main(["eval", str(path), "--start"]) == 2 and "minimim" in capsys.readouterr().err
    path.write_text(text + "health: {startup_budget: 1s}\n")
    assert main(["eval", str(path), "--start"]) == 2
    assert "the service was not ready within 1 s" in capsys.readouterr().err
    assert main(["eval", "http://127.0.0.1:1", "--start", "--task", "gsm8k:x"]) == 2
    assert "--start: name a manifest" in capsys.readouterr().err
