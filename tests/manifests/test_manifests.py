"""Every manifest in manifests/ is checked and planned whole, on the machine that its comment names, over the published
config.json of its model and headers without weights. Byte counts are worked out here from config.json alone."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import yaml

from appliance.config.keys import find
from appliance.config.problems import Refused
from appliance.config.schema_file import manifest_schema
from appliance.config.settings import Given, Option
from appliance.hardware.described import hardware
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan
from appliance.planning.validate import validate
from tests.appliance.certificates import write_certificate
from tests.manifests.shapes import CONFIGS, PARAMETERS, count_parameters, make_checkpoint, make_gguf

FOLDER = Path(__file__).resolve().parents[2] / "manifests"
NAMES = sorted(path.name for path in FOLDER.glob("*.yaml"))
MODEL_PATH = "model.path" if find(("model", "path")) else "model.source"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True)
class Expected:
    """Model of a manifest and the expected values of its plan."""

    model: str  # name of its configuration
    device: str
    kernels: str
    kv_dtype: str
    context: int
    at_once: int  # complete contexts that the caches must have room for at the same time
    weights: str = "stored"
    weight_share: float = 1.0
    """Highest ratio of the weights' bytes on a CPU to two bytes per parameter. A tied head is stored twice: as rows to
    look up, and packed."""
    ranks: int = 1  # tensor-parallel processes of each engine


LLAMA, LARGE, QWEN = "Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct", "Qwen3-0.6B"
EXPECTED: dict[str, Expected] = {
    "minimal.yaml": Expected(QWEN, "cpu", "avx512", "bfloat16", 40960, 1, weight_share=1.27),
    "cpu.yaml": Expected("Qwen2.5-0.5B-Instruct", "cpu", "avx512", "int8", 8192, 16, "int8", 0.52),
    "gptq-cpu.yaml": Expected("Qwen2.5-7B-Instruct-GPTQ-Int4", "cpu", "avx512", "int8", 16384, 16, weight_share=0.52),
    "gguf-cpu.yaml": Expected("Qwen2.5-7B-Instruct", "cpu", "avx512", "int8", 16384, 8, weight_share=0.45),
    "moe-cpu.yaml": Expected("Qwen3-30B-A3B", "cpu", "avx512", "int8", 32768, 2, "int4", 0.3),
    "layered.yaml": Expected(QWEN, "cpu", "avx512", "bfloat16", 8192, 1, weight_share=1.27),
    "replicas.yaml": Expected(QWEN, "cpu", "avx512", "bfloat16", 40960, 1, weight_share=1.27),
    "secured.yaml": Expected(QWEN, "cpu", "avx512", "bfloat16", 40960, 1, weight_share=1.27),
    "h200-8b.yaml": Expected(LLAMA, "cuda", "triton", "bfloat16", 32768, 20),
    "h200-8b-fp8.yaml": Expected(LLAMA, "cuda", "triton", "fp8", 32768, 40),
    "h200-70b-tp2.yaml": Expected(LARGE, "cuda", "triton", "bfloat16", 32768, 10, ranks=2),
    "h100-70b-tp4.yaml": Expected(LARGE, "cuda", "triton", "fp8", 65536, 10, ranks=4),
    "h200-70b-tp8.yaml": Expected(LARGE, "cuda", "triton", "bfloat16", 131072, 20, ranks=8),
    "long-context.yaml": Expected(LLAMA, "cuda", "triton", "fp8", 131072, 12),
    "sagemaker.yaml": Expected("Qwen3-8B", "cuda", "triton", "bfloat16", 40960, 16),
    "vertex.yaml": Expected(LLAMA, "cuda", "triton", "bfloat16", 131072, 4),
    "embeddings.yaml": Expected("Qwen3-Embedding-0.6B", "cpu", "avx512", "float16", 8192, 2, "int8", 0.68),
    "reranker.yaml": Expected("bge-reranker-v2-m3", "cpu", "avx512", "float32", 1024, 2, weight_share=2.01),
    "translation.yaml": Expected("nllb-200-distilled-600M", "cpu", "avx512", "float32", 2048, 16, weight_share=2.87),
    "kubernetes.yaml": Expected("Qwen3-8B", "cuda", "triton", "bfloat16", 32768, 20),
}


def machine(name: str) -> Machine:
    """The machine that a manifest's comment names, by the table of devices."""
    found = re.search(r"^# For: .+? \(--hardware (\S+)\)", (FOLDER / name).read_text(), re.MULTILINE)
    assert found, f"{name} does not say what it is for"
    return hardware(found[1])


def checkpoint(name: str, folder: Path) -> Path:
    make = make_gguf if name.startswith("gguf") else make_checkpoint
    return make(EXPECTED[name].model, folder / EXPECTED[name].model)


def planned(name: str, folder: Path, *options: Option, on: str = "", overlays: tuple[str, ...] = ()) -> Plan:
    """The whole plan, as `slipway check` makes it, with files of secrets that are there."""
    path, keys = checkpoint(name, folder), folder / "keys"
    keys.write_text("key\n")
    where = str(path) if MODEL_PATH == "model.path" else json.dumps({"path": str(path)})
    given = [Option(f"--set {MODEL_PATH}", MODEL_PATH, where)]
    if "secrets:" in (FOLDER / name).read_text():
        given.append(Option("--set secrets", "secrets", json.dumps({"clients": {"file": str(keys)}})))
    if "tls:" in (FOLDER / name).read_text():
        write_certificate(keys.parent, "tls")
        files = {"certificate": str(keys.parent / "tls.crt"), "key": str(keys.parent / "tls.key")}
        given.append(Option("--set endpoints.tls", "endpoints.tls", json.dumps(files)))
    return validate(Given(FOLDER / name, (*given, *options), overlays=overlays), hardware(on) if on else machine(name))


def config(name: str) -> dict[str, int]:
    found: dict[str, int] = json.loads((CONFIGS / f"{EXPECTED[name].model}.json").read_text())
    return found


def norms(facts: dict[str, int], ranks: int) -> tuple[int, int]:
    """Return the number of norm weights in the checkpoint and on each rank, where they are float32. Every rank has the
    two norms of each layer and the final norm in full. Query and key norms (Qwen3) are stored once in the checkpoint
    and repeated for each head of the rank."""
    layers, whole = facts["num_hidden_layers"], facts["hidden_size"] * (2 * facts["num_hidden_layers"] + 1)
    if facts["model_type"] != "qwen3":
        return whole, whole
    heads = (facts["num_attention_heads"] + facts["num_key_value_heads"]) // ranks
    return whole + layers * 2 * facts["head_dim"], whole + layers * heads * facts["head_dim"]


def test_there_are_enough_and_each_has_an_expectation() -> None:
    assert len(NAMES) >= 12
    # tests/e2e/test_smollm2.py serves the real model of the second
    assert {*EXPECTED, "demo.yaml", "smollm2.yaml"} == set(NAMES)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_manifest_is_planned_on_the_machine_it_is_for(name: str, tmp_path: Path) -> None:
    found, expected = planned(name, tmp_path), EXPECTED[name]
    engine = found.engines[0]
    assert (engine.hardware.device, engine.hardware.kernels, engine.quantization.kv_cache) == (
        expected.device,
        expected.kernels,
        expected.kv_dtype,
    )
    assert (engine.quantization.weights, engine.model.max_context) == (expected.weights, expected.context)
    assert engine.parallelism.tensor == expected.ranks
    assert found.memory.whole_contexts * len(found.engines) >= expected.at_once
    assert found.memory.total <= found.memory.budget


def test_the_demo_is_planned_on_any_machine() -> None:
    found = validate(Given(FOLDER / "demo.yaml"), machine("demo.yaml"))
    assert found.engines[0].model.max_context == 2048 and found.memory.whole_contexts >= 1


@pytest.mark.parametrize(
    ("overlays", "on", "running", "context", "profile"),
    [
        ((), "avx512:8:14GiB", 16, 8192, "cpu"),
        (("dev",), "avx512:8:14GiB", 16, 2048, "cpu"),
        (("public",), "h200x1", 512, 8192, "large-gpu"),
    ],
)
def test_the_layered_manifest_has_what_its_layers_say(
    overlays: tuple[str, ...], on: str, running: int, context: int, profile: str, tmp_path: Path
) -> None:
    found = planned("layered.yaml", tmp_path, on=on, overlays=overlays)
    assert (found.engines[0].scheduling.max_running, found.engines[0].model.max_context) == (running, context)
    assert found.gateway.limits.max_waiting == 256 and f"profile {profile} " in "".join(found.layers)
    assert (found.gateway.api_keys is not None) == ("public" in overlays)


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_and_pages_have_the_bytes_that_the_configuration_makes(name: str, tmp_path: Path) -> None:
    found, expected = planned(name, tmp_path), EXPECTED[name]
    engine, facts = found.engines[0], config(name)
    parameters = PARAMETERS[expected.model.removesuffix("-GPTQ-Int4")]
    weights = found.memory.weights
    if expected.device == "cuda":
        stored, held = norms(facts, expected.ranks)
        assert weights == 2 * (parameters - stored) // expected.ranks + 4 * held
    else:
        assert 0.2 < weights / (2 * parameters) <= expected.weight_share
    if "Roberta" in found.architecture:  # reads both ways
        assert (found.memory.block_bytes, engine.memory.kv_cache) == (0, 0)
        return
    if "M2M100" in found.architecture:  # all heads of a decoder's layer have keys
        width = facts["d_model"]
        facts = facts | {"hidden_size": width, "num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    head = facts.get("head_dim", facts["hidden_size"] // facts["num_attention_heads"])
    rows = 2 * facts["num_hidden_layers"] * facts["num_key_value_heads"] * engine.cache.block_tokens // expected.ranks
    scales = 4 * rows if (expected.device, engine.quantization.kv_cache) == ("cpu", "int8") else 0
    assert found.memory.block_bytes == rows * head * BYTES[engine.quantization.kv_cache] + scales
    assert found.memory.blocks == engine.memory.kv_cache // found.memory.block_bytes


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.sampled(5)
def test_a_manifest_is_refused_where_its_memory_is_not_there(name: str, tmp_path: Path) -> None:
    """Half of what its weights alone take: no machine may be said to hold it."""
    whole = planned(name, tmp_path / "whole")
    with pytest.raises(Refused, match="memory"):
        free = str(whole.memory.weights / 2 / whole.memory.free / 2)
        planned(name, tmp_path / "half", Option("--set hardware.memory_share", "hardware.memory_share", free))


@pytest.mark.parametrize("model", PARAMETERS)
def test_the_configurations_declare_as_many_weights_as_the_published_checkpoints_have(
    model: str, tmp_path: Path
) -> None:
    assert count_parameters(model, tmp_path / "m") == PARAMETERS[model]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_says_what_it_is_for_and_where_its_schema_is(name: str) -> None:
    lines = (FOLDER / name).read_text().splitlines()
    head = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    (schema,) = [line.partition("$schema=")[2] for line in head if line.startswith("# yaml-language-server:")]
    assert (FOLDER / schema).resolve() == FOLDER.parent / "docs" / "manifest.schema.json"
    assert (FOLDER / schema).is_file()
    assert len(head[0]) > 20 and machine(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_valid_by_the_schema_and_each_key_of_it_counts(name: str) -> None:
    """The unchanged manifest is valid; it becomes invalid when any of its keys is misspelt."""
    validator = jsonschema.Draft202012Validator(manifest_schema())
    text = (FOLDER / name).read_text()
    validator.validate(yaml.safe_load(text))
    for key in re.findall(r"^ *(\w+):", text, re.MULTILINE):
        wrong = yaml.safe_load(re.sub(rf"^( *){key}:", rf"\1{key}s:", text, count=1, flags=re.MULTILINE))
        if key not in ("secrets", "clients", "dev", "public"):  # names of one's own, and what must be empty elsewhere
            assert list(validator.iter_errors(wrong)), f"{key}s is taken"
