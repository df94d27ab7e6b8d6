"""Speculative decoding with the prediction heads of a checkpoint, compared with transformers' layers in a loop."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.llm import LLM
from kernels.cpu.library import best
from tests.engine import test_speculation as lookup
from tests.engine.layers.families import WRITERS
from tests.engine.test_draft_models import check_drafts, spied

KERNELS = ["torch", best()]
LAYERS = 2  # of the target; the next one is in the prediction head
PROMPT = lookup.REPEATED[:23]
path = lookup.path  # fixture
COMMON = {
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS + 1,
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
    """Names of the tensors of a head in a checkpoint, and variants of its computation."""

    layer: str  # beginning of the names of its layer
    own: tuple[str, str, str, str]  # names of the projection, of both norms and of the final norm or ""
    renamed: tuple[str, str] = ("", "")  # in the layer
    skips_first: bool = True  # the embedding at position 0 is zero
    states_first: bool = False
    before_norm: bool = False  # reads the hidden states before the final norm
    offset: float = 0.0  # of the weights of norms


NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
LAST = f"model.layers.{LAYERS}."
QWEN = Layout(
    "mtp.layers.0.",
    ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    skips_first=False,
    offset=1.0,
)
NEXTN_NAMES = tuple(LAST + name for name in NEXTN)
MIMO_NAMES = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
MODELS: dict[str, tuple[type, dict, Layout]] = {
    "glm": (transformers.Glm4MoeForCausalLM, {**EXPERTS, "head_dim": 8}, Layout(LAST, NEXTN_NAMES)),
    "deepseek": (transformers.DeepseekV3ForCausalLM, {**EXPERTS, **LATENT}, Layout(LAST, NEXTN_NAMES)),
    "ernie": (
        transformers.Ernie4_5_MoeForCausalLM,
        ERNIE,
        Layout(
            "model.mtp_block.0.",
            ("model.mtp_linear_proj.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", ""),
        ),
    ),
    "qwen3-next": (transformers.Qwen3NextForCausalLM, NEXT, QWEN),
    "qwen3.5": (transformers.Qwen3_5ForCausalLM, DELTA, QWEN),
    "mimo": (
        transformers.Qwen2ForCausalLM,
        {},
        Layout(
            "model.mtp_layers.0.",
            tuple(f"model.mtp_layers.0.{name}" for name in MIMO_NAMES),
            states_first=True,
            before_norm=True,
        ),
    ),
    "mimo-v2": (
        transformers.MiMoV2FlashForCausalLM,
        MIMO_2,
        Layout(
            "model.mtp.layers.0.",
            tuple(f"model.mtp.layers.0.{name}" for name in ("eh_proj", "enorm", "hnorm", "final_layernorm")),
            ("post_attention_layernorm", "pre_mlp_layernorm"),
            skips_first=False,
            before_norm=True,
        ),
    ),
    "longcat": (
        transformers.LongcatFlashForCausalLM,
        LONGCAT,
        Layout(
            "model.mtp.layers.0.",
            (*(f"model.mtp.layers.0.{name}" for name in ("eh_proj", "enorm.m", "hnorm.m")), "model.mtp.norm"),
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


class Reference:
    """A model of transformers whose last layer is the block of a prediction head."""

    def __init__(self, family: str, folder: Path, target: Path) -> None:
        kind, changes, self.layout = MODELS[family]
        torch.manual_seed(3)
        self.whole = kind(kind.config_class(**{**COMMON, **changes})).float().eval()
        for norm in (one for one in self.whole.modules() if type(one).__name__.endswith("RMSNorm")):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        hidden = COMMON["hidden_size"]
        sizes = [(hidden, 2 * hidden), (hidden,), (hidden,), (hidden,)]
        self.projection, self.of_token, self.of_state, self.final = (torch.rand(size) + 0.2 for size in sizes)
        self.projection = torch.randn(sizes[0]) * 0.3
        last = self.whole.model.layers[LAYERS]
        self.kind = (getattr(self.whole.config, "layer_types", None) or ["full_attention"])[-1]
        self.block = DenseLayer(last) if family == "longcat" else last
        self._save(family, folder, target)
        self.whole.model.layers = self.whole.model.layers[:LAYERS]
        if self.layout.before_norm:
            self.whole.model.norm = torch.nn.Identity()

    def _save(self, family: str, folder: Path, target: Path) -> None:
        layout = self.layout
        self.whole.save_pretrained(folder)
        shutil.copy(target / "tokenizer.json", folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
        if family == "longcat":
            config |= {"num_hidden_layers": 2 * LAYERS, "num_layers": LAYERS}
        for key in ("layer_types", "mlp_layer_types"):
            if len(config.get(key) or ()) > LAYERS:
                config[key] = config[key][:LAYERS]
        if family == "mimo":
            config["architectures"] = ["MiMoForCausalLM"]
        tensors = load_file(folder / "model.safetensors")
        saved = {name.removeprefix(LAST): one for name, one in tensors.items() if name.startswith(LAST)}
        tensors = {name: one for name, one in tensors.items() if not name.startswith(LAST)}
        if family == "longcat":
            kept = {name: one for name, one in self.whole.state_dict().items() if not name.startswith(LAST)}
            tensors, config = WRITERS["longcat"](kept, config)
            saved = {name: one.clone() for name, one in self.block.state_dict().items()}
            tensors |= {"model.mtp.embed_tokens.weight": torch.zeros(3, 3)}
        tensors |= {layout.layer + name.replace(*layout.renamed): one for name, one in saved.items()}
        if layout.own == NEXTN_NAMES:  # copies, which are not the embedding and the head of this model
            tensors |= {LAST + name: torch.zeros(3, 3) for name in ("embed_tokens.weight", "shared_head.head.weight")}
        values = self.projection, self.of_token, self.of_state, self.final
        own = {f"{name}.weight": one for name, one in zip(layout.own, values, strict=True) if name}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {name: one.contiguous() for name, one in tensors.items()}
        save_file({**tensors, **own}, folder / "model.safetensors", {"format": "pt"})

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight + self.layout.offset
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.whole.config.rms_norm_eps)

    def _rotations(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = self.whole.model.rotary_emb
        by_kind = isinstance(self.whole, transformers.MiMoV2FlashForCausalLM)
        return rotary(x, positions, self.kind) if by_kind else rotary(x, positions)

    @torch.no_grad()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        """Return the most likely drafts after these tokens."""
        states = self.whole.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        ids = list(ids)
        for _ in range(count):
            tokens = self.whole.model.embed_tokens(torch.tensor(ids[1:]))
            if self.layout.skips_first:
                tokens[0] = 0.0
            parts = [self._normed(tokens, self.of_token), self._normed(states, self.of_state)]
            joined = torch.cat(parts[::-1] if self.layout.states_first else parts, -1)
            x = (joined @ self.projection.T)[None]
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
            rotations = self._rotations(x, positions)
            out = self.block(x, attention_mask=mask, position_embeddings=rotations, position_ids=positions)
            out = out[0] if out.dim() == 3 else out
            out = self._normed(out, self.final) if self.layout.own[3] else out
            ids.append(int(self.whole.lm_head(out[-1]).argmax()))
            states = torch.cat((states, out[-1:]))
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


def test_drafts_with_triton_kernels(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    model = Reference("glm", tmp_path / "glm", path)
    params = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=4)
    prompts = [PROMPT[:9], PROMPT[2:6]]
    with engine(tmp_path / "glm", "off", best()) as llm:
        expected = llm.generate(prompts, params)
    with engine(tmp_path / "glm", "mtp", "triton", draft_tokens=2, max_step_tokens=8, dtype="float32") as llm:
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
