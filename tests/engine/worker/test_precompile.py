"""Tests that precompilation for a model covers every kernel that its worker launches in any step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.jit import installed
from tests.tiers import NIGHTLY, thinned

ROOT = Path(__file__).resolve().parents[3]
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
pytestmark = [pytest.mark.skipif(not installed(), reason="Triton is not installed")]

# Interpreted kernels have no signature, so another process, which does not interpret, records the launches of all
# models: one process, because the imports take longer than the steps of a model.
SCRIPT = """
import json, random, sys
from pathlib import Path

import torch

import msgspec

from engine.api.config import AdapterLoadingConfig
from engine.api.messages import Pooling, Sampling
from engine.core.plan import NewRow, Row, StepPlan
from engine.worker.precompile import config_for, parts_on, runner_on, serving_launches
from kernels.fp8 import products_of
from engine.models.checkpoint import read_checkpoint
from kernels.tools.aot import TARGETS, signature
from kernels.jit import recorded

torch.set_num_threads(1)


def plan(step, form, random_, reads_sources):
    rows = random_.choice([1, 1, 2, 3, 16, 17, 40])
    counts = [random_.choice([1, 1, 2, 15, 16, 17, 33]) for _ in range(rows)]
    new, made = [], []
    for slot, count in enumerate(counts):
        sampling = random_.choice([
            Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.9), Sampling(top_k=7), Sampling(min_p=0.1),
            Sampling(top_p=0.5, top_k=3, min_p=0.2), Sampling(repetition_penalty=1.2), Sampling(presence_penalty=0.5),
            Sampling(logprobs=3), Sampling(logit_bias={1: 2.0, 7: 1.0}), Sampling(bad_words=((1, 2, 3), (4,))),
            Sampling(allowed_token_ids=(1, 2, 3)), Sampling(min_tokens=4),
        ])
        source = random_.choice([1, count // 2, count - 1]) if reads_sources and count > 1 else 0
        new.append(NewRow(slot, tuple(range(count)), count, sampling, (2, 3), count, source=source))
        blocks = tuple(tuple(1 for _ in range(-(-count // form.block_tokens))) for _ in form.groups)
        made.append(Row(slot, 0, count, random_.random() < 0.8, blocks))
    return StepPlan(step, tuple(new), (), tuple(made))


def pooled(plan, form, random_):
    \"\"\"The same with prompts that are pooled, some of them not complete, some of two segments.\"\"\"
    new = []
    for one in plan.new:
        asked = Pooling(
            random_.choice(["embed", "token_embed"]),
            random_.choice([None, None, 16, 17]),
            random_.choice([None, False]),
        )
        first = random_.choice([0, 1, one.prompt_tokens - 1])
        segments = (first, one.prompt_tokens - first) if 0 < first < one.prompt_tokens else ()
        more = random_.choice([0, 0, 5]) if form.groups else 0
        changes = {"pooling": asked, "segments": segments, "prompt_tokens": one.prompt_tokens + more}
        new.append(msgspec.structs.replace(one, **changes))
    rows = tuple(msgspec.structs.replace(row, sample=False) for row in plan.rows)
    return msgspec.structs.replace(plan, new=tuple(new), rows=rows)


def check(steps, folder, kv_dtype, invariant, weights, slots=None):
    adapters = AdapterLoadingConfig(max_active=slots, max_rank=8)
    options = {"invariant": invariant == "invariant", "weights": weights, "adapters": adapters}
    config = config_for(Path(folder), "bfloat16", kv_dtype, **options)
    known = {signature(wanted.launch) for wanted in serving_launches(TARGETS["sm_90"], config=config)}
    random_ = random.Random(5)
    fp8 = products_of((9, 0), invariant=config.hardware.batch_invariant)
    parts, model = parts_on(torch.device("cpu"), config, fp8)
    runner, form = runner_on(torch.device("cpu"), parts, config), parts.layout
    pools = read_checkpoint(config.model.path, weights=False).model.pooler is not None
    missing, launches = {}, 0
    with torch.inference_mode():
        for step in range(steps):
            made = plan(step, form, random_, model.encoder is not None)
            with recorded() as found:
                runner.start(pooled(made, form, random_) if pools else made, {})
            launches += len(found)
            for launch in found:
                if signature(launch) not in known:
                    missing[launch.kernel.fn.__name__] = repr(signature(launch))
    return {"known": len(known), "launches": launches, "missing": missing}


for line in sys.stdin:
    print(json.dumps(check(*json.loads(line))), flush=True)
"""


class Checker:
    """The process of SCRIPT. An error of a model ends it; the next model gets another one."""

    def __init__(self, folder):
        self._script, self._errors = folder / "script.py", folder / "errors"
        self._script.write_text(SCRIPT)
        self._process = None

    def check(self, *arguments):
        if self._process is None:
            with self._errors.open("w") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, str(self._script)],
                    **surroundings(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self.close()
            pytest.fail(self._errors.read_text())
        return json.loads(line)

    def close(self):
        if self._process is not None:
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def checker(tmp_path_factory):
    made = Checker(tmp_path_factory.mktemp("checker"))
    yield made
    made.close()


MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "decoder_sparse_step": 2,
}


def config_json(folder, **changed):
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    } | changed
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


STEPS = [10, pytest.param(24, marks=NIGHTLY)]
"""Random steps of a model. 10 have all kinds of rows and of sampling."""

ENCODER = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "hidden_act": "gelu"}
BERT = ENCODER | {"architectures": ["BertModel"], "type_vocab_size": 2, "layer_norm_eps": 1e-12}
MODERN = ENCODER | {
    **{"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean", "norm_bias": False},
    **{"attention_bias": False, "mlp_bias": False, "classifier_bias": False, "local_attention": 64, "norm_eps": 1e-5},
    **{"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}},
}

SIDES = {"layers": 2, "attention_heads": 2, "ffn_dim": 192}
BART = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDES.items()}
BART |= {"architectures": ["BartForConditionalGeneration"], "d_model": 128, "max_position_embeddings": 128}
BART |= {"decoder_start_token_id": 2}


def surroundings():
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"cwd": ROOT, "env": kept | {"PYTHONPATH": paths}, "text": True}


@pytest.mark.parametrize(
    ("changed", "kv_dtype", "invariant", "weights"),
    [
        ({}, "bfloat16", "plain", "stored"),
        ({"num_attention_heads": 2, "tie_word_embeddings": False}, "bfloat16", "invariant", "stored"),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "fp8", "plain", "stored"),
        (MOE, "bfloat16", "plain", "stored"),
        (MOE | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 80}, "bfloat16", "invariant", "stored"),
        (MOE | {"quantization_config": FP8_BLOCKS}, "bfloat16", "plain", "stored"),
        ({}, "bfloat16", "plain", "fp8"),
        ({}, "bfloat16", "invariant", "fp8"),
        ({"quantization_config": FP8_BLOCKS}, "bfloat16", "plain", "stored"),
        ({"quantization_config": FP8_STATIC}, "bfloat16", "plain", "stored"),
        ({"tie_word_embeddings": False}, "bfloat16", "plain", "int4"),
        (MOE | {"quantization_config": GPTQ}, "bfloat16", "invariant", "stored"),
        (BERT, "bfloat16", "plain", "stored"),
        (MODERN, "bfloat16", "invariant", "stored"),
        ({"architectures": ["Qwen3Model"]}, "fp8", "plain", "stored"),
        (BART, "bfloat16", "plain", "stored"),
        (BART | {"architectures": ["M2M100ForConditionalGeneration"]}, "fp8", "invariant", "fp8"),
    ],
    ids=[
        *("plain", "invariant", "window-fp8", "experts", "experts-invariant", "experts-fp8", "rounded"),
        *(
            "rounded-invariant",
            "fp8-blocks",
            "fp8-static",
            "int4",
            "gptq-experts-invariant",
            "bert",
            "modernbert-invariant",
            "qwen3-pooled-fp8",
        ),
        *("bart", "m2m100-fp8-invariant"),
    ],
)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.slow
@pytest.mark.sampled(3)
def test_every_launch_is_compiled_ahead(checker, tmp_path, steps, changed, kv_dtype, invariant, weights):
    """Compare the launches of many kinds of real steps with those recorded from a few steps on meta tensors."""
    folder = config_json(tmp_path / "model", **changed)
    found = checker.check(steps, str(folder), kv_dtype, invariant, weights)
    assert found["missing"] == {}
    assert found["known"] > 10 and found["launches"] > steps * 10


@pytest.mark.slow
@pytest.mark.parametrize("changed", thinned([{}, MOE], kept=[MOE]), ids=["plain", "experts"])
@pytest.mark.parametrize("steps", STEPS)
def test_every_launch_with_adapters_is_compiled_ahead(checker, tmp_path, steps, changed):
    found = checker.check(steps, str(config_json(tmp_path / "model", **changed)), "bfloat16", "plain", "stored", 3)
    assert found["missing"] == {}
    assert found["launches"] > steps * 20


@pytest.mark.slow
@pytest.mark.nightly("tests/engine/worker/test_precompile.py::test_every_launch_is_compiled_ahead")
def test_the_command_compiles_a_model_from_its_configuration_alone(tmp_path):
    folder = config_json(tmp_path / "model")
    command = ["-m", "engine.worker.precompile", str(folder), "--target", "sm_90", "--check", "--processes", "2"]
    command += ["--json", str(tmp_path / "report.json")]
    done = subprocess.run([sys.executable, *command], **surroundings(), capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    names = {row["compiled"]["kernel"] for row in found["kernels"]}
    assert {"rms_norm_kernel", "qk_norm_rope_kv_kernel", "decode_attention_kernel", "prefill_attention_kernel"} <= names
    assert all(row["cases"] == ["Qwen3ForCausalLM bfloat16"] for row in found["kernels"])
