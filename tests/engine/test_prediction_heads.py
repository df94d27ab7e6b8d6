"""Speculative decoding with the prediction heads of a checkpoint, compared with transformers' layers in a loop."""

import json
import shutil
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
OWN = {  # names of the projection, of both norms and of the final norm; in ERNIE the head has no final norm
    "glm": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "ernie": ("mtp_linear_proj.0", "mtp_emb_norm.0", "mtp_hidden_norm.0", ""),
}
MODELS: dict[str, tuple[type, dict]] = {
    "glm": (transformers.Glm4MoeForCausalLM, {**EXPERTS, "head_dim": 8}),
    "deepseek": (transformers.DeepseekV3ForCausalLM, {**EXPERTS, **LATENT}),
    "ernie": (transformers.Ernie4_5_MoeForCausalLM, ERNIE),
}


class Reference:
    """A model of transformers whose last layer is the block of a prediction head."""

    def __init__(self, family: str, folder: Path, target: Path) -> None:
        kind, changes = MODELS[family]
        torch.manual_seed(3)
        self.whole = kind(kind.config_class(**{**COMMON, **changes})).float().eval()
        for norm in (one for one in self.whole.modules() if type(one).__name__.endswith("RMSNorm")):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        hidden = COMMON["hidden_size"]
        sizes = [(hidden, 2 * hidden), (hidden,), (hidden,), (hidden,)]
        self.projection, self.of_token, self.of_state, self.final = (torch.rand(size) + 0.2 for size in sizes)
        self.projection = torch.randn(sizes[0]) * 0.3
        self._save(family, folder, target)
        self.block = self.whole.model.layers[LAYERS]
        self.whole.model.layers = self.whole.model.layers[:LAYERS]
        self.has_final = bool(OWN[family][3])

    def _save(self, family: str, folder: Path, target: Path) -> None:
        self.whole.save_pretrained(folder)
        shutil.copy(target / "tokenizer.json", folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
        for key in ("layer_types", "mlp_layer_types"):
            config.pop(key, None)
        (folder / "config.json").write_text(json.dumps(config))
        prefix = "model." if family == "ernie" else f"model.layers.{LAYERS}."
        tensors = load_file(folder / "model.safetensors")
        if family == "ernie":
            block = f"model.layers.{LAYERS}."
            tensors = {name.replace(block, "model.mtp_block.0."): one for name, one in tensors.items()}
        else:  # copies, which are not the embedding and the head of this model
            tensors |= {prefix + name: torch.zeros(3, 3) for name in ("embed_tokens.weight", "shared_head.head.weight")}
        values = self.projection, self.of_token, self.of_state, self.final
        own = {f"{prefix}{name}.weight": one for name, one in zip(OWN[family], values, strict=True) if name}
        save_file({**tensors, **own}, folder / "model.safetensors", {"format": "pt"})

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.whole.config.rms_norm_eps)

    @torch.no_grad()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        """Return the most likely drafts after these tokens."""
        states = self.whole.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        ids = list(ids)
        for _ in range(count):
            tokens = self.whole.model.embed_tokens(torch.tensor(ids[1:]))
            tokens[0] = 0.0
            joined = torch.cat((self._normed(tokens, self.of_token), self._normed(states, self.of_state)), -1)
            x = (joined @ self.projection.T)[None]
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
            rotations = self.whole.model.rotary_emb(x, positions)
            out = self.block(x, attention_mask=mask, position_embeddings=rotations, position_ids=positions)
            out = out[0] if out.dim() == 3 else out
            out = self._normed(out, self.final) if self.has_final else out
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
@pytest.mark.sampled(5)
def test_replies_with_prediction_heads_are_those_without(name: str, tokens: int, reference):
    folder, _ = reference
    wanted, prompts = lookup.requests(name, 4), [PROMPT[: 5 * number + 2] for number in range(4)]
    with engine(folder, "off", best()) as llm:
        expected = lookup.seen(llm.generate(prompts, wanted))
    with engine(folder, "mtp", best(), draft_tokens=tokens, max_step_tokens=16, max_running=3) as llm:
        assert lookup.seen(llm.generate(prompts, wanted)) == expected
        counters = lookup.counters(llm)
        assert counters.draft_tokens >= counters.accepted_tokens > 0


@pytest.mark.sampled(2)
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
    own = (f"model.layers.{LAYERS}.", "model.mtp_")
    save_file(
        {name: one for name, one in tensors.items() if not name.startswith(own)},
        tmp_path / "stripped" / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(CheckpointError, match="no tensors of prediction heads"):
        engine(tmp_path / "stripped", "mtp", "torch")
