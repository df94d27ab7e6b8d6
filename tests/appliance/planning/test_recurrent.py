"""Plans of recurrent and hybrid models: slots of recurrent state, and the limits that follow from them."""

import json
from pathlib import Path

import pytest

from appliance.cli.main import main

MAMBA = {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
MAMBA |= {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 32, "torch_dtype": "float32"}
LAYER = (3 * (128 + 2 * 2 * 32) + 8 * 16 * 32) * 4  # inputs of the convolution, and a matrix for each head
HYBRID = {"architectures": ["BambaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3}
HYBRID |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "attn_layer_indices": [1]}
HYBRID |= {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 32, "max_position_embeddings": 512}


def manifest(folder: Path, config: dict[str, object], more: str = "") -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    path = folder / "m.yaml"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: model}}}}\n{more}")
    return path


def planned(path: Path, capsys: pytest.CaptureFixture[str], host: str = "cpu:4:8GiB") -> tuple[dict, dict]:
    """Return the configuration of the engine and the memory."""
    assert main(["plan", "--hardware", host, "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["engines"][0], found["memory"]


def scheduling(running: int, prefix: bool = True) -> str:
    return f"engine: {{scheduling: {{max_running: {running}}}, cache: {{prefix: {str(prefix).lower()}}}}}\n"


@pytest.mark.parametrize("config", [MAMBA, HYBRID], ids=["recurrent", "hybrid"])
@pytest.mark.parametrize(("running", "prefix", "slots"), [(5, True, 22), (40, True, 81), (40, False, 41)])
def test_requests_and_snapshots_have_a_slot_each(config, running, prefix, slots, tmp_path, capsys):
    engine, memory = planned(manifest(tmp_path, config, scheduling(running, prefix)), capsys)
    assert memory["state_slot_bytes"] == 2 * LAYER
    assert memory["state_slots"] == slots and memory["states"] == slots * 2 * LAYER
    assert engine["memory"]["ranks"][0]["states"] == memory["states"] < memory["workspace"]


def test_a_request_with_drafts_has_a_second_slot(tmp_path, capsys):
    drafting = "speculation: {method: auto}\n" + scheduling(5)
    engine, memory = planned(manifest(tmp_path, MAMBA, drafting), capsys)
    assert engine["speculation"]["method"] == "suffix" and engine["speculation"]["adaptive"]
    assert memory["state_slots"] == 2 * 5 + 16 + 1 and memory["states"] == 27 * 2 * LAYER
    assert main(["plan", str(manifest(tmp_path, MAMBA, drafting))]) == 0
    said = capsys.readouterr().out
    assert "auto → suffix" in said and "10 slots for requests and 16 for snapshots" in said


def test_a_model_without_attention_has_no_kv_cache(tmp_path, capsys):
    engine, memory = planned(manifest(tmp_path, MAMBA, scheduling(5)), capsys)
    assert (memory["cache"], engine["memory"]["kv_cache"], engine["model"]["max_context"]) == (0, 0, 131072)
    assert {one["requests"] for one in memory["concurrency"]} == {5}
    assert main(["plan", str(manifest(tmp_path, MAMBA, scheduling(5)))]) == 0
    said = capsys.readouterr().out
    assert "5 slots for requests and 16 for snapshots" in said and "concurrent requests: 5, of any length" in said


def test_auto_keeps_the_state_within_a_quarter_of_the_memory(tmp_path, capsys):
    wide = MAMBA | {"hidden_size": 1024, "num_heads": 128, "state_size": 256}
    engine, memory = planned(manifest(tmp_path, wide), capsys, "cpu:4:4GiB")
    assert engine["scheduling"]["max_running"] == 64
    assert memory["states"] <= memory["budget"] / 4 < 2 * memory["states"]


def test_keys_of_the_kv_cache_have_no_effect_without_attention(tmp_path, capsys):
    for key in ("hardware: {kv_cache_memory: 1GiB}", "quantization: {kv_cache: float16}"):
        assert main(["check", str(manifest(tmp_path, MAMBA, f"{key}\n"))]) == 2
        assert "this model has no attention" in capsys.readouterr().err
    assert main(["check", str(manifest(tmp_path, HYBRID, "quantization: {kv_cache: float16}\n"))]) == 0


def test_groups_of_a_mixer_are_divided_among_ranks_or_refused(tmp_path, capsys):
    for groups, ranks, code in ((2, 2, 0), (1, 2, 0), (8, 3, 2)):
        path = manifest(tmp_path, HYBRID | {"mamba_n_groups": groups}, f"parallelism: {{tensor: {ranks}}}\n")
        assert main(["check", str(path)]) == code
    assert "which have 8 heads of a mixer, 8 groups of a mixer's heads" in capsys.readouterr().err
