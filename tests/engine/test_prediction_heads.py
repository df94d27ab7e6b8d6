"""Speculative decoding with the prediction heads of a checkpoint, compared with transformers' layers in a loop."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.llm import LLM
from engine.models.checkpoint import read_checkpoint
from engine.models.draft import with_drafts
from kernels.cpu.library import best
from tests.engine import test_speculation as lookup
from tests.engine.layers.families import WRITERS, beside_vision
from tests.engine.test_draft_models import check_drafts, spied
from tests.tiers import thinned

KERNELS = ["torch", best()]
LAYERS = 2  # of the target; the next ones are in the prediction heads
PROMPT = lookup.REPEATED[:23]
path = lookup.path  # fixture
COMMON = {
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
ERNIE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": LAYERS - 1,
}
DELTA = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
NEXT = {
    **DELTA,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
MIMO_2 = {
    **{key: EXPERTS[key] for key in ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")},
    "num_attention_heads": 8,
    "head_dim": 12,
    "v_head_dim": 8,
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense"],
}
MIMO_2_HEADS = {
    "layer_types": ["full_attention", *["sliding_attention"] * 4],
    "mlp_layer_types": ["dense", "sparse", *["dense"] * 3],
}
STEP = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "num_sliding_attention_heads": 6,
    "head_dim": 8,
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
    "swiglu_limits": [0, 0.3, 0, 0],
    "swiglu_limits_shared": [0, 0, 0.2, 0.1],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
LONGCAT = {
    **LATENT,
    "head_dim": 4,
    "num_layers": LAYERS + 1,
    "num_hidden_layers": 2 * (LAYERS + 1),
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "n_routed_experts": 4,
    "moe_topk": 2,
    "zero_expert_num": 2,
}


@dataclass(frozen=True)
class Layout:
    """Names of the tensors of heads in a checkpoint ({}: the number of the head), and variants of their computation."""

    layer: str  # beginning of the names of its layer
    own: tuple[str, str, str, str]  # names of the projection, of both norms and of the final norm or ""
    renamed: tuple[str, str] = ("", "")  # in the layer
    skips_first: bool = True  # the embedding at position 0 is zero
    states_first: bool = False
    before_norm: bool = False  # reads the hidden states before the final norm
    offset: float = 0.0  # of the weights of norms
    heads: int = 1
    first: int = 0  # number of the first head
    further_states: str = "normed"  # read by later heads: "normed" or "before norm" of the head before, or "model"
    output: str = ""  # name of the output matrix, if a head has its own


NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
LAST = f"model.layers.{LAYERS}."
BEYOND = "model.layers.{}."  # layers beyond the last one
QWEN = Layout(
    "mtp.layers.{}.",
    ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    skips_first=False,
    offset=1.0,
)
NEXTN_NAMES = tuple(BEYOND + name for name in NEXTN)
NEXTN_LAYOUT = Layout(BEYOND, NEXTN_NAMES, first=LAYERS)
MIMO_NAMES = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
MIMO_2_LAYOUT = Layout(
    "model.mtp.layers.{}.",
    tuple(f"model.mtp.layers.{{}}.{name}" for name in ("eh_proj", "enorm", "hnorm", "final_layernorm")),
    ("post_attention_layernorm", "pre_mlp_layernorm"),
    skips_first=False,
    before_norm=True,
    further_states="model",
)
STEP_NAMES = tuple(BEYOND + name for name in ("eh_proj", "enorm", "hnorm", "transformer.shared_head.norm"))
MODELS: dict[str, tuple[type, dict, Layout]] = {
    "glm": (transformers.Glm4MoeForCausalLM, {**EXPERTS, "head_dim": 8}, NEXTN_LAYOUT),
    "deepseek": (transformers.DeepseekV3ForCausalLM, {**EXPERTS, **LATENT}, NEXTN_LAYOUT),
    "deepseek-2": (transformers.DeepseekV3ForCausalLM, {**EXPERTS, **LATENT}, replace(NEXTN_LAYOUT, heads=2)),
    "ernie": (
        transformers.Ernie4_5_MoeForCausalLM,
        ERNIE,
        Layout(
            "model.mtp_block.{}.",
            ("model.mtp_linear_proj.{}", "model.mtp_emb_norm.{}", "model.mtp_hidden_norm.{}", ""),
        ),
    ),
    "qwen3-next": (transformers.Qwen3NextForCausalLM, NEXT, QWEN),
    "qwen3.5": (transformers.Qwen3_5ForCausalLM, DELTA, QWEN),
    "mimo": (
        transformers.Qwen2ForCausalLM,
        {},
        Layout(
            "model.mtp_layers.{}.",
            tuple(f"model.mtp_layers.{{}}.{name}" for name in MIMO_NAMES),
            states_first=True,
            before_norm=True,
        ),
    ),
    "mimo-v2": (transformers.MiMoV2FlashForCausalLM, MIMO_2, MIMO_2_LAYOUT),
    "mimo-v2-3": (transformers.MiMoV2FlashForCausalLM, MIMO_2 | MIMO_2_HEADS, replace(MIMO_2_LAYOUT, heads=3)),
    "step": (
        transformers.Step3p7ForConditionalGeneration,
        STEP,
        Layout(
            BEYOND,
            STEP_NAMES,
            skips_first=False,
            before_norm=True,
            offset=1.0,
            heads=2,
            first=LAYERS,
            further_states="before norm",
            output=BEYOND + "transformer.shared_head.output",
        ),
    ),
    "longcat": (
        transformers.LongcatFlashForCausalLM,
        LONGCAT,
        Layout(
            "model.mtp.layers.{}.",
            (*(f"model.mtp.layers.{{}}.{name}" for name in ("eh_proj", "enorm.m", "hnorm.m")), "model.mtp.norm"),
            ("mlp.", "transformer_layer.mlp."),
            skips_first=False,
        ),
    ),
}
PLAIN = ["glm", "deepseek", "ernie", "mimo"]  # for tests that need no more


class DenseLayer(torch.nn.Module):
    """First half of a layer of LongCat, without its experts."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn[0], layer.mlps[0]
        self.input_layernorm = layer.input_layernorm[0]
        self.post_attention_layernorm = layer.post_attention_layernorm[0]

    def forward(self, x: torch.Tensor, **inputs) -> torch.Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), **inputs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True)
class Head:
    """One prediction head."""

    block: torch.nn.Module
    kind: str  # of its attention
    projection: torch.Tensor
    of_token: torch.Tensor
    of_state: torch.Tensor
    final: torch.Tensor
    output: torch.Tensor  # [vocab, hidden], if it has its own

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.projection, self.of_token, self.of_state, self.final


class Reference:
    """A model of transformers whose last layers are the blocks of prediction heads."""

    def __init__(self, family: str, folder: Path, target: Path) -> None:
        kind, changes, self.layout = MODELS[family]
        torch.manual_seed(3)
        settings = {**COMMON, "num_hidden_layers": LAYERS + self.layout.heads, **changes}
        self.whole = kind(kind.config_class(**(beside_vision(settings) if family == "step" else settings)))
        self.whole = self.whole.float().eval()
        self.text = getattr(self.whole.model, "language_model", self.whole.model)
        for norm in (one for one in self.text.modules() if type(one).__name__.endswith("RMSNorm")):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        kinds = getattr(self.text.config, "layer_types", None) or ["full_attention"] * (LAYERS + self.layout.heads)
        self.heads = [
            self._head(DenseLayer(layer) if family == "longcat" else layer, kind)
            for layer, kind in zip(self.text.layers[LAYERS:], kinds[LAYERS:], strict=True)
        ]
        self._save(family, folder, target)
        self.text.layers = self.text.layers[:LAYERS]
        if self.layout.before_norm:
            self.text.norm = torch.nn.Identity()

    def _head(self, block: torch.nn.Module, kind: str) -> Head:
        hidden = COMMON["hidden_size"]
        norms = [torch.rand(hidden) + 0.2 for _ in range(3)]
        projection, output = torch.randn(hidden, 2 * hidden) * 0.3, torch.randn(COMMON["vocab_size"], hidden) * 0.2
        return Head(block, kind, projection, *norms, output)

    def _save(self, family: str, folder: Path, target: Path) -> None:
        layout = self.layout
        self.whole.save_pretrained(folder)
        shutil.copy(target / "tokenizer.json", folder)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        if family == "step":
            tensors, config = WRITERS["step3p5"](dict(self.whole.state_dict()), config)
            config |= {"bos_token_id": None, "eos_token_id": COMMON["eos_token_id"]}
        config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": layout.heads}
        if family == "longcat":
            config |= {"num_hidden_layers": 2 * LAYERS, "num_layers": LAYERS}
        for key in ("layer_types", "mlp_layer_types"):
            if len(config.get(key) or ()) > LAYERS and family != "step":  # which has entries of its heads
                config[key] = config[key][:LAYERS]
        if family == "mimo":
            config["architectures"] = ["MiMoForCausalLM"]
        beyond = tuple(BEYOND.format(LAYERS + number) for number in range(layout.heads))
        saved = [
            {name.removeprefix(one): tensor for name, tensor in tensors.items() if name.startswith(one)}
            for one in beyond
        ]
        tensors = {name: one for name, one in tensors.items() if not name.startswith(beyond)}
        if family == "longcat":
            kept = {name: one for name, one in self.whole.state_dict().items() if not name.startswith(beyond)}
            tensors, config = WRITERS["longcat"](kept, config)
            saved = [{name: one.clone() for name, one in head.block.state_dict().items()} for head in self.heads]
            tensors |= {"model.mtp.embed_tokens.weight": torch.zeros(3, 3)}
        for number, (head, layer) in enumerate(zip(self.heads, saved, strict=True), layout.first):
            path = layout.layer.format(number)
            tensors |= {path + name.replace(*layout.renamed): one for name, one in layer.items()}
            if layout.own == NEXTN_NAMES:  # copies, which are not the embedding and the head of this model
                tensors |= {path + one: torch.zeros(3, 3) for one in ("embed_tokens.weight", "shared_head.head.weight")}
            own = zip(layout.own, head.tensors, strict=True)
            tensors |= {f"{name.format(number)}.weight": one for name, one in own if name}
            if layout.output:
                tensors[f"{layout.output.format(number)}.weight"] = head.output
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {name: one.clone().contiguous() for name, one in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight + self.layout.offset
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.text.config.rms_norm_eps)

    def _rotations(self, x: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = self.text.rotary_emb
        by_kind = type(self.whole).__name__.startswith(("MiMoV2", "Step3p7"))
        return rotary(x, positions, kind) if by_kind else rotary(x, positions)

    def _computed(self, head: Head, ids: list[int], states: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return the draft of a head for these tokens, and the hidden states that it gives to the next one."""
        tokens = self.text.embed_tokens(torch.tensor(ids))
        if self.layout.skips_first:
            tokens[0] = 0.0
        parts = [self._normed(tokens, head.of_token), self._normed(states, head.of_state)]
        joined = torch.cat(parts[::-1] if self.layout.states_first else parts, -1)
        x = (joined @ head.projection.T)[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        rotations = self._rotations(x, positions, head.kind)
        before = head.block(x, attention_mask=mask, position_embeddings=rotations, position_ids=positions)
        before = before[0] if before.dim() == 3 else before
        out = self._normed(before, head.final) if self.layout.own[3] else before
        logits = out[-1] @ head.output.T if self.layout.output else self.whole.lm_head(out[-1])
        return int(logits.argmax()), before if self.layout.further_states == "before norm" else out

    @torch.no_grad()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        """Return the most likely drafts after these tokens. Each head computes all positions."""
        of_model = self.text(torch.tensor([ids[:-1]])).last_hidden_state[0]
        ids, states = list(ids), of_model
        for number in range(count):
            last = min(number, len(self.heads) - 1)
            token, out = self._computed(self.heads[last], ids[1 + last :], states)
            ids.append(token)
            if number >= len(self.heads) - 1:  # the last head reads its own states of further positions
                states = torch.cat((states, out[-1:]))
            else:
                states = of_model if self.layout.further_states == "model" else out
        return ids[-count:]


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, path: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, Reference(request.param, folder, path)


def engine(folder: Path, method: str, kernels: str, **more) -> LLM:
    return lookup.engine(folder, method, kernels, **more)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.sampled(3)
def test_drafts_are_those_of_the_reference(kernels: str, reference, monkeypatch: pytest.MonkeyPatch):
    folder, model = reference
    (params,) = lookup.requests("greedy", 1)
    params = msgspec.structs.replace(params, max_tokens=14)
    prompts = [PROMPT, PROMPT[2:12]]
    with engine(folder, "off", kernels) as llm:
        expected = llm.generate(prompts, params)
    # Several chunks of a prompt, and several rows: each has the hidden states of its own tokens.
    with engine(folder, "mtp", kernels, draft_tokens=3, max_step_tokens=16) as llm:
        made = spied(llm, monkeypatch)
        assert lookup.seen(llm.generate(prompts, params)) == lookup.seen(expected)
    assert check_drafts(made, prompts, expected, model.drafts) > 30


@pytest.mark.parametrize("family", thinned(("glm", "step"), ["glm"]))
def test_drafts_with_triton_kernels(family: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    folder = tmp_path / family
    model = Reference(family, folder, path)
    params = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=4)
    prompts = [PROMPT[:9], PROMPT[2:6]]
    with engine(folder, "off", best()) as llm:
        expected = llm.generate(prompts, params)
    with engine(folder, "mtp", "triton", draft_tokens=2, max_step_tokens=8, dtype="float32") as llm:
        made = spied(llm, monkeypatch)
        assert lookup.seen(llm.generate(prompts, params)) == lookup.seen(expected)
    assert check_drafts(made, prompts, expected, model.drafts) >= 3


@pytest.mark.sampled(3)
def test_drafts_of_a_head_that_pause_keep_every_reply(reference):
    folder, _ = reference
    wanted, prompts = lookup.requests("sampled", 6), [PROMPT[: 3 * number + 2] for number in range(6)]
    with engine(folder, "off", best()) as llm:
        expected = lookup.seen(llm.generate(prompts, wanted))
    with engine(folder, "mtp", best(), draft_tokens=3, adaptive_drafts=True, max_running=4) as llm:
        assert lookup.seen(llm.generate(prompts, wanted)) == expected
        assert lookup.counters(llm).draft_tokens > 0
        steps = llm._loop.scheduler.step
        llm.generate(prompts[:1], wanted[:1])
        level = llm._loop.scheduler.drafting.control.state.levels[1]
        assert level.plain_steps > 0 and llm._loop.scheduler.step > steps


@pytest.mark.parametrize("name", ["sampled", "json", "penalties"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.sampled(11)
def test_replies_with_prediction_heads_are_those_without(name: str, tokens: int, reference):
    folder, _ = reference
    wanted, prompts = lookup.requests(name, 4), [PROMPT[: 5 * number + 2] for number in range(4)]
    with engine(folder, "off", best()) as llm:
        expected = lookup.seen(llm.generate(prompts, wanted))
    with engine(folder, "mtp", best(), draft_tokens=tokens, max_step_tokens=16, max_running=3) as llm:
        assert lookup.seen(llm.generate(prompts, wanted)) == expected
        counters = lookup.counters(llm)
        assert counters.draft_tokens >= counters.accepted_tokens > 0


@pytest.mark.sampled(4)
def test_rank_0_drafts_with_the_whole_head(reference):
    folder, _ = reference
    wanted = lookup.requests("sampled", 2)
    replies = []
    for method, ranks in (("off", 1), ("mtp", 2)):
        with engine(folder, method, best(), tensor=ranks) as llm:
            replies.append(lookup.seen(llm.generate([PROMPT] * 2, wanted)))
    assert replies[0] == replies[1] and lookup.counters(llm).accepted_tokens > 0


def test_the_cache_of_quantized_weights_separates_a_model_and_its_heads(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Their matrices are in the same files, and have the same names."""
    Reference("deepseek-2", tmp_path / "model", path)
    params, found = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=8), []
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        more = {} if cache is None else {"weight_cache": str(cache)}
        with engine(tmp_path / "model", "mtp", best(), draft_tokens=2, weights="int8", **more) as llm:
            made = spied(llm, monkeypatch)
            llm.generate([PROMPT], params)
        found.append(made)
    assert found[0] == found[1] == found[2] and len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (2, 2), (9, 3)])
def test_as_many_heads_are_loaded_as_drafts_have_tokens(tokens: int, heads: int, path: Path, tmp_path: Path):
    Reference("mimo-v2-3", tmp_path / "model", path)
    target = read_checkpoint(tmp_path / "model")
    assert len(with_drafts(target, "mtp", "", tokens=tokens).drafts) == heads


def test_checkpoints_without_prediction_heads_are_refused(path: Path, reference, tmp_path: Path):
    with pytest.raises(CheckpointError, match="LlamaForCausalLM has no prediction heads"):
        engine(path, "mtp", "torch")
    folder, _ = reference
    shutil.copytree(folder, tmp_path / "stripped")
    tensors = load_file(folder / "model.safetensors")
    own = (LAST, "model.mtp", "mtp.")
    save_file(
        {name: one for name, one in tensors.items() if not name.startswith(own)},
        tmp_path / "stripped" / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(CheckpointError, match="no tensors of prediction heads"):
        engine(tmp_path / "stripped", "mtp", "torch")
