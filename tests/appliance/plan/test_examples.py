"""Every manifest in manifests/ is loaded, planned and valid for editors; the pages made from the schema are current."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from appliance import __version__
from appliance.declare.keys import keys, leaves
from appliance.declare.schema_file import manifest_page, manifest_schema, schema_text
from appliance.declare.settings import Given, load
from appliance.declare.upgrade import upgrade
from appliance.plan.machine import Gpu, Machine
from appliance.plan.plan import plan
from appliance.plan.profiles import first_match
from engine.models.checkpoint import Checkpoint
from engine.models.parts import MLP, Attention, Branch, Embedding, Head, Model, RMSNorm, Rope

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "manifests").glob("*.yaml"))
MACHINE = Machine(
    cores=8,
    cores_from="affinity",
    memory_free=64 * 2**30,
    memory_from="MemAvailable",
    gpus=(Gpu("NVIDIA H100", 80 * 2**30, 79 * 2**30, (9, 0)),),
)


def checkpoint() -> Checkpoint:
    """A model of the size that the examples talk about: 28 layers, 8 KV heads of 128, 40,960 tokens."""
    norm = RMSNorm(size=1024, eps=1e-6)
    attention = Attention(hidden=1024, heads=16, kv_heads=8, head_dim=128, rope=Rope(dim=128, theta=1e6))
    block = (Branch(body=attention, before=norm), Branch(body=MLP(hidden=1024, inner=3072), before=norm))
    embed = Embedding(vocab=151936, hidden=1024)
    model = Model(embed=embed, blocks=(block,) * 28, norm=norm, head=Head(tied=True), max_context=40960)
    return Checkpoint(
        path=Path("/models/Qwen3-0.6B"),
        architecture="Qwen3ForCausalLM",
        config={},
        generation={},
        model=model,
        dtype="bfloat16",
        eos_token_ids=(1,),
        tensors={},
    )


def test_there_are_examples_and_the_demo_is_one() -> None:
    assert {"demo.yaml", "minimal.yaml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_loaded_and_planned(path: Path) -> None:
    found = plan(load(Given(path)), checkpoint(), MACHINE)
    assert found.engines[0].max_context > 0 and found.memory.whole_contexts >= 1
    assert path.read_text().startswith("# "), "an example begins with what it is for"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_valid_by_the_schema_that_editors_use(path: Path) -> None:
    jsonschema.Draft202012Validator(manifest_schema()).validate(yaml.safe_load(upgrade(path.read_bytes(), path.name)))


@pytest.mark.parametrize(
    ("overlays", "gpus", "running", "context", "profile"),
    [((), (), 16, 8192, "cpu"), (("dev",), (), 16, 2048, "cpu"), (("public",), MACHINE.gpus, 512, 8192, "large-gpu")],
)
def test_the_layered_example_has_what_its_layers_say(
    overlays: tuple[str, ...], gpus: tuple[Gpu, ...], running: int, context: int, profile: str
) -> None:
    machine = replace(MACHINE, gpus=gpus)
    settings = load(
        Given(ROOT / "manifests/layered.yaml", overlays=overlays),
        lambda device, profiles: first_match(device, profiles, machine),
    )
    found = plan(settings, checkpoint(), machine)
    assert (found.engines[0].max_running, found.engines[0].max_context) == (running, context)
    assert settings.file(("model", "path")) == Path("/models/Qwen3-0.6B") and found.gateway.max_waiting == 256
    assert f"profile {profile} " in "".join(found.layers)


def test_the_demo_is_served_under_its_name_on_the_port_that_make_serve_tells() -> None:
    manifest = load(Given(ROOT / "manifests/demo.yaml")).manifest
    assert (manifest.model.source.path, manifest.model.names, manifest.endpoints.port) == ("demo", ("demo",), 8000)


def test_the_schema_is_one_of_draft_2020_12_with_a_meaning_for_every_key() -> None:
    schema = json.loads(schema_text())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    assert [key.name for key in keys().values() if not key.text] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": {"prot": 1}},
        {"endpoints": {"port": "8000"}},
        {"hardware": {"device": "gpu"}},
        {"limits": {"max_body": "8Mi"}},
        {"lifecycle": {"drain": "8 sec"}},
        {"secrets": {"key": "hunter2"}},
        {"secrets": {"KEY": {"env": "A"}}},
        {"hardware": {"memory_share": 1.5}},
        {"apiVersion": "slipway/v3"},
        {"model": {"source": {"path": "/m", "vertex": {}}}},
        {"model": {"source": {}}},
        {"model": {"source": {"sagemaker": None}}},
        {"model": {"path": "/m"}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(wrong: dict[str, object]) -> None:
    manifest = {"apiVersion": "slipway/v2", "model": {"source": {"path": "/m"}}} | wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(manifest_schema()).validate(manifest)


def test_the_pages_made_from_the_schema_are_current() -> None:
    hint = "run: python tools/manifest_page.py"
    assert (ROOT / "docs/manifest.md").read_text() == manifest_page(), hint
    assert (ROOT / "docs/manifest.schema.json").read_text() == schema_text(), hint


def test_the_page_has_a_row_for_every_key_with_default_and_meaning() -> None:
    page = manifest_page()
    for key in leaves():
        if len(key.path) > 1:
            assert f"| `{key.path[-1]}` | " in page and key.text.split(";")[0].replace("|", "\\|") in page, key.name


def test_the_version_is_that_of_the_package() -> None:
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
