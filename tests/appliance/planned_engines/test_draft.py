"""A draft model in a manifest: planned bytes, the context, problems with the keys."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from appliance.cli.main import main
from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.hardware.described import hardware
from appliance.planning.memory import planned_parts
from appliance.planning.validate import validate
from appliance.planning.workspace import StepSize, workspace
from engine.models.checkpoint import read_checkpoint
from engine.worker.build import build_worker
from kernels.cpu.library import best
from tests.engine import test_speculation as lookup
from tests.engine.test_draft_models import SHAPE
from tests.engine.test_eagle_heads import Eagle3, save_target
from tests.engine.test_prediction_heads import Reference

ROOT = Path(__file__).resolve().parents[3]
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: demo}}\nhardware: {device: cpu}\n"
DRAFT = "speculation: {method: draft, model: demo, tokens: 3}\n"
Write = Callable[[str], Path]
lookup_path = lookup.path  # fixture


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a manifest of the demo's checkpoint next to a copy of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(ROOT / "manifests" / "demo", tmp_path / "demo")

    def write(more: str) -> Path:
        path = tmp_path / "m.yaml"
        path.write_text(HEAD + more)
        return path

    return write


@pytest.mark.parametrize("kernels", ["torch", best()])
def test_planned_bytes_are_those_of_the_engine(kernels: str, manifest: Write):
    settings = (Option("--set", "hardware.kernels", kernels), Option("--set", "hardware.kv_cache_memory", "2MiB"))
    plan = validate(Given(manifest(DRAFT), settings))
    assert Path(plan.engines[0].speculation.model).name == "demo"
    worker = build_worker(plan.engines[0], lambda phase, fraction: None)
    try:
        planned, found = planned_parts(plan.memory)[0], worker.memory_usage
        assert found == {name: planned[name] for name in found}
        weights = sum(found[part] for part in ("embedding", "attention", "mlp", "norms"))
        assert found["draft"] == weights + found.get("head", 0)  # the same model
        assert worker.blocks == plan.memory.blocks
        draft, own = (one.nbytes for one in (worker._runner._draft.passes, worker._runner._pages))
        assert draft == own and found["kv"] + found["self_test"] == draft + own
    finally:
        worker.close()


def test_only_the_first_rank_has_the_draft_model(manifest: Write):
    plan = validate(Given(manifest(f"{DRAFT}parallelism: {{tensor: 2}}\n")))
    first, second = planned_parts(plan.memory)
    assert first["draft"] > 0 and "draft" not in second and first["kv"] == second["kv"]


def test_the_context_of_the_draft_model_limits_the_context(manifest: Write, tmp_path: Path):
    path = manifest(DRAFT.replace("model: demo", "model: short"))
    shutil.copytree(tmp_path / "demo", tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    whole = config["max_position_embeddings"]
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": whole // 2}))
    plan = validate(Given(path))
    assert plan.engines[0].model.max_context == whole // 2
    (found,) = (one for one in plan.effective if one.key == "model.max_context")
    assert found.reason == "maximum of the draft model"
    with pytest.raises(Refused, match=f"the draft model supports {whole // 2} tokens"):
        validate(Given(path, (Option("--set", "model.max_context", str(whole)),)))


@pytest.mark.parametrize(
    ("family", "kernels", "heads"),
    [("glm", "torch", 1), ("glm", best(), 1), ("mimo-v2-3", best(), 2), ("step", "torch", 2), ("step", best(), 2)],
)
def test_the_prediction_heads_of_a_checkpoint_are_planned(
    family: str, kernels: str, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Drafts of 2 tokens use 2 heads of 3."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Reference(family, tmp_path / "model", ROOT / "manifests" / "demo")
    path = tmp_path / "m.yaml"
    path.write_text(HEAD.replace("path: demo", "path: model") + "speculation: {method: mtp, tokens: 2}\n")
    settings = (Option("--set", "hardware.kernels", kernels), Option("--set", "hardware.kv_cache_memory", "2MiB"))
    plan = validate(Given(path, settings))
    assert plan.engines[0].speculation.method == "mtp" and not plan.engines[0].speculation.model
    worker = build_worker(plan.engines[0], lambda phase, fraction: None)
    try:
        planned, found = planned_parts(plan.memory)[0], worker.memory_usage
        assert found == {name: planned[name] for name in found} and found["draft"] > 0
        draft = worker._runner._draft
        pages = worker._runner._pages.nbytes + sum(one.nbytes for one in draft.passes)
        assert len(draft.passes) == heads and found["kv"] + found["self_test"] == pages
    finally:
        worker.close()


def test_auto_selects_the_prediction_head_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Reference("glm", tmp_path / "model", ROOT / "manifests" / "demo")
    path = tmp_path / "m.yaml"
    path.write_text(HEAD.replace("path: demo", "path: model") + "speculation: {method: auto}\n")
    plan = validate(Given(path))
    assert plan.engines[0].speculation.method == "mtp" and plan.engines[0].speculation.adaptive
    assert plan.gateway.speculation == "mtp" and planned_parts(plan.memory)[0]["draft"] > 0
    (found,) = (one for one in plan.effective if one.key == "speculation.method")
    assert found.reason.startswith(
        "the checkpoint has a prediction head; drafts are up to 4 tokens of the checkpoint's"
    )


def test_auto_selects_lookup_without_a_prediction_head(manifest: Write):
    plan = validate(Given(manifest("speculation: {method: auto}\n")))
    assert plan.engines[0].speculation.method == "suffix" and "draft" not in planned_parts(plan.memory)[0]


@pytest.fixture
def eagle(lookup_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest with an EAGLE-3 head in the folder `head`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = save_target(tmp_path / "model", lookup_path)
    Eagle3(target).save(tmp_path / "head")
    path = tmp_path / "m.yaml"
    path.write_text(
        HEAD.replace("path: demo", "path: model") + "speculation: {method: eagle3, model: head, tokens: 3}\n"
    )
    return path


@pytest.mark.parametrize("kernels", ["torch", best()])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_eagle_head_is_planned(kernels: str, ranks: int, eagle: Path):
    """A rank with the whole tables of the target shares its embedding with the head."""
    settings = (Option("--set", "hardware.kernels", kernels), Option("--set", "hardware.kv_cache_memory", "2MiB"))
    settings += (Option("--set", "parallelism.tensor", str(ranks)),)
    plan = validate(Given(eagle, settings))
    assert plan.engines[0].speculation.method == "eagle3" and Path(plan.engines[0].speculation.model).name == "head"
    planned = planned_parts(plan.memory)
    if ranks > 1:
        assert planned[0]["draft"] > 0 and "draft" not in planned[1]
        return
    worker = build_worker(plan.engines[0], lambda phase, fraction: None)
    try:
        found = worker.memory_usage
        assert found == {name: planned[0][name] for name in found} and found["draft"] > 0
        (passes,) = worker._runner._draft.passes
        model = passes._model
        assert model.vocabulary.table is worker._runner._text_model.vocabulary.table
    finally:
        worker.close()


@pytest.mark.parametrize(("kernels", "copies"), [("torch", 2), ("triton", 2), (best(), 1)])
def test_states_that_a_head_reads_are_planned(kernels: str, copies: int, eagle: Path):
    model = read_checkpoint(eagle.parent / "model").model
    kept, size = replace(model, kept_layers=(1, 3)), StepSize(tokens=100, rows=8)
    with_head, without = (
        sum(step.value for step in workspace(one, device="cpu", kernels=kernels, size=size, element_bytes=4))
        for one in (kept, model)
    )
    buffer = 0 if kernels != best() else 2
    assert with_head - without == 100 * (copies * 2 + buffer) * model.embed.hidden * 4


def test_the_lock_covers_the_files_of_a_head(eagle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["lock", str(eagle)]) == 0
    text = (tmp_path / "m.lock").read_text()
    assert 'draft:\n  "config.json"' in text and '  "model.safetensors"' in text.split("draft:")[1]
    assert main(["lock", "--check", str(eagle)]) == 0
    weights = tmp_path / "head" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()
    assert main(["lock", "--check", str(eagle)]) == exits.INTEGRITY.number
    found = capsys.readouterr()
    assert "model.safetensors" in found.out + found.err and "changed" in found.out + found.err


def problems(path: Path, *options: Option) -> dict[str, str]:
    with pytest.raises(Refused) as refused:
        validate(Given(path, options))
    return {problem.key: problem.message for problem in refused.value.problems}


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("speculation: {method: draft}\n", "speculation.method", "set speculation.model"),
        ("speculation: {method: eagle}\n", "speculation.method", "eagle needs the folder of a draft model or head"),
        ("speculation: {method: eagle3, model: demo}\n", "speculation.model", "architectures is Qwen3ForCausalLM"),
        (
            "speculation: {method: ngram, model: demo}\n",
            "speculation.model",
            "ngram has no draft model; set it to one of draft, eagle, eagle3",
        ),
        ("speculation: {method: mtp}\n", "speculation.method", "Qwen3ForCausalLM has no prediction heads"),
        ("speculation: {method: mtp, model: demo}\n", "speculation.model", "mtp has no draft model"),
        (
            "speculation: {method: draft, model: nothing}\n",
            "speculation.model",
            "nothing: no such directory; set",
        ),
    ],
)
def test_wrong_keys_are_refused_before_anything_starts(text: str, key: str, message: str, manifest: Write):
    found = problems(manifest(text))
    assert list(found) == [key] and message in found[key]


def test_another_vocabulary_is_refused_before_anything_starts(manifest: Write, tmp_path: Path):
    path = manifest(DRAFT.replace("model: demo", "model: other"))
    shutil.copytree(tmp_path / "demo", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    found = problems(path)
    assert (
        list(found) == ["speculation.model"]
        and "its vocabulary is not the target's: token" in found["speculation.model"]
    )


def test_triton_kernels_have_draft_models(manifest: Write):
    path, gpu = manifest(DRAFT), hardware("h100x1")
    path.write_text(path.read_text().replace("device: cpu", "device: cuda"))
    plan = validate(Given(path), gpu)
    assert plan.engines[0].hardware.kernels == "triton" and plan.engines[0].speculation.method == "draft"
    assert planned_parts(plan.memory)[0]["draft"] > 0


def test_the_expected_gain_counts_a_pass_for_each_draft_token(manifest: Write) -> None:
    """The draft model is the same model, so a pass takes as long as a step of one row."""
    settings = (Option("--set", "hardware.kernels", "torch"),)
    plan = validate(Given(manifest(DRAFT), settings))
    (found,) = (one for one in plan.effective if one.key == "speculation.method")
    assert "of the draft model, whose weights of 12.4 MiB are read once for each" in found.reason
    assert plan.estimate.roofline is not None
    drafts, plain = plan.estimate.roofline.drafts, validate(Given(manifest(""), settings)).estimate.roofline
    assert plain is not None and plain.decode == plan.estimate.roofline.decode, "drafts are not in the ceilings"
    assert drafts[0].rows == 1 and drafts[0].step == pytest.approx(4)
    assert dict(drafts[0].gains)[0.5] == pytest.approx(1.875 / 4)
    (account,) = (one for one in plan.estimate.accounts if one.key == "drafts:1")
    assert [step.name for step in account.steps[:3]] == [
        "step without drafts",
        "step with drafts",
        "pass of the draft model",
    ]


def test_a_draft_model_that_attends_to_more_tokens_is_refused(manifest: Write, tmp_path: Path) -> None:
    """The target frees the blocks before its window, which this draft model would read."""
    path = manifest(DRAFT)
    for name, window in (("target", 9), ("demo", None)):
        config = transformers.MistralConfig(**{**SHAPE, "vocab_size": 300}, sliding_window=window)
        transformers.MistralForCausalLM(config).save_pretrained(tmp_path / name)
        shutil.copy(ROOT / "manifests" / "demo" / "tokenizer.json", tmp_path / name)
    path.write_text(path.read_text().replace("source: {path: demo}", "source: {path: target}"))
    found = problems(path)
    assert list(found) == ["speculation.model"] and "attends to more tokens" in found["speculation.model"]


def test_number_formats_that_do_not_suit_the_draft_model_are_refused(manifest: Write, tmp_path: Path) -> None:
    """The engine loads the draft model with the formats of its target, and would end at the start."""
    path = manifest(DRAFT.replace("model: demo", "model: narrow"))
    config = transformers.LlamaConfig(**{**SHAPE, "vocab_size": 1257, "hidden_size": 72})  # heads of 18
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "narrow")
    shutil.copy(tmp_path / "demo" / "tokenizer.json", tmp_path / "narrow")
    for key, value, message in (
        ("quantization.embedding", "int6", "of the draft model, rows have 72 numbers"),
        ("quantization.kv_cache", "int4", "a multiple of 4 elements, and the model or its draft model has 18"),
    ):
        found = problems(path, Option("--set", key, value))
        assert list(found) == [key] and message in found[key]
    assert validate(Given(path)).engines[0].speculation.model.endswith("narrow")
