"""Speculative decoding with EAGLE and EAGLE-3 heads, compared with their published architecture in plain torch."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import msgspec
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as GgmlType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from engine.api.errors import CheckpointError, ConfigError
from engine.api.messages import Output
from engine.core.replay import main as replay
from engine.llm import LLM
from engine.models.checkpoint import read_checkpoint
from engine.models.eagle import kept_layers, read_eagle
from kernels.cpu.library import best
from tests.engine import test_speculation as lookup
from tests.engine.float_writers import FLOAT_KINDS
from tests.engine.gguf_writer import Kind, drawn_blocks, write_gguf
from tests.engine.integer_writers import INTEGER_KINDS
from tests.engine.layers import test_gguf
from tests.engine.quantized_writers import gptq, whole
from tests.engine.test_draft_models import check_drafts, drafted, spied
from tests.tiers import paired, thinned

KERNELS = ["torch", best()]
VOCAB, HIDDEN, HEADS, DIM, LAYERS = 263, 32, 4, 8, 4
ROWS = 141  # of the EAGLE-3 head
KEPT = (1, 3, 4)  # layers whose inputs the EAGLE-3 head reads; 4: the output of the last one
PROMPT = lookup.REPEATED[:23]
path = lookup.path  # fixture
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,  # heads are trained with short texts, and do not limit the target
}
MATRICES = {"self_attn.q_proj": HEADS * DIM, "self_attn.k_proj": 2 * DIM, "self_attn.v_proj": 2 * DIM}


def layer_shapes(inputs: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, inputs) for name, size in MATRICES.items()}
    shapes["self_attn.o_proj.weight"] = (HIDDEN, HEADS * DIM)
    shapes |= {f"mlp.{name}_proj.weight": (48, HIDDEN) for name in ("gate", "up")}
    return shapes | {"mlp.down_proj.weight": (HIDDEN, 48), "post_attention_layernorm.weight": (HIDDEN,)}


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def rotated(x: Tensor) -> Tensor:
    """Rotate [tokens, heads, dim] by the positions 0, 1, …"""
    angles = torch.arange(len(x)).unsqueeze(1) / 10_000.0 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos().repeat(1, 2).unsqueeze(1), angles.sin().repeat(1, 2).unsqueeze(1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Reference:
    """A head in plain torch, after SafeAILab/EAGLE's cnets1.py and cnets.py, on a random Llama of transformers."""

    layer = "layers.0."

    def __init__(self, target: Path) -> None:
        self.target = transformers.LlamaForCausalLM.from_pretrained(target)
        generator = torch.Generator().manual_seed(4)
        self.weights = {
            name: torch.randn(shape, generator=generator) * 0.3 if len(shape) > 1 else torch.rand(shape) + 0.5
            for name, shape in self.shapes().items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        whole = {self.layer + name: shape for name, shape in layer_shapes(HIDDEN).items()}
        return whole | {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the checkpoint: the head has a copy of the target's embedding."""
        return {**self.weights, "embed_tokens.weight": self.target.model.embed_tokens.weight.detach().clone()}

    def config(self) -> dict:
        return {**CONFIG, "architectures": ["LlamaForCausalLM"]}

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        save_file(self.tensors(), folder / "model.safetensors", {"format": "pt"})
        return folder

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ self.of(name).T).unflatten(1, (-1, DIM)) for name in MATRICES)
        q, k = rotated(q), rotated(k)
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return y @ self.of("self_attn.o_proj").T

    def mlp(self, x: Tensor) -> Tensor:
        x = normed(x, self.of("post_attention_layernorm"))
        gate, up, down = (self.of(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def of(self, name: str) -> Tensor:
        return self.weights[f"{self.layer}{name}.weight"]

    def states(self, ids: list[int]) -> Tensor:
        """Return the states that the head reads of the target."""
        return self.target.model(torch.tensor([ids])).last_hidden_state[0]

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states for further drafts, and the logits of the last position."""
        x = torch.cat((tokens, states), -1) @ self.weights["fc.weight"].T + self.weights["fc.bias"]
        x = x + self.attention(x)
        x = x + self.mlp(x)
        return x, self.target.lm_head(x[-1])

    @torch.no_grad()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        """Return the most likely drafts after these tokens."""
        states, ids = self.states(ids[:-1]), list(ids)
        for _ in range(count):
            own, logits = self.forward(self.target.model.embed_tokens(torch.tensor(ids[1:])), states)
            ids.append(int(logits.argmax()))
            states = torch.cat((states, own[-1:]))
        return ids[-count:]


class Eagle3(Reference):
    """`residual_normed`: the variant of speculators with norm_before_residual."""

    layer = "midlayer."
    residual_normed = False

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:ROWS].sort().values

    def shapes(self) -> dict[str, tuple[int, ...]]:
        whole = {self.layer + name: shape for name, shape in layer_shapes(2 * HIDDEN).items()}
        whole |= {f"{self.layer}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "hidden_norm")}
        return whole | {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (ROWS, HIDDEN)}

    def tensors(self) -> dict[str, Tensor]:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[self.ids] = True
        return {**self.weights, "d2t": self.ids - torch.arange(ROWS), "t2d": known}

    def config(self) -> dict:
        own = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in KEPT]}
        return {
            **CONFIG,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": ROWS,
            "eagle_config": own,
        }

    def states(self, ids: list[int]) -> Tensor:
        model, found = self.target.model, list[Tensor]()
        hooks = [
            model.layers[layer].register_forward_pre_hook(lambda module, given: found.append(given[0][0]))
            for layer in KEPT[:-1]
        ]
        hooks.append(model.norm.register_forward_pre_hook(lambda module, given: found.append(given[0][0])))
        model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return torch.cat(found, -1) @ self.weights["fc.weight"].T

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        joined = normed(tokens, self.of("input_layernorm")), normed(states, self.of("hidden_norm"))
        x = (joined[1] if self.residual_normed else states) + self.attention(torch.cat(joined, -1))
        x = x + self.mlp(x)
        logits = normed(x[-1], self.weights["norm.weight"]) @ self.weights["lm_head.weight"].T
        return x, torch.full((VOCAB,), -torch.inf).index_copy(0, self.ids, logits)


class Speculators(Eagle3):
    """The format of speculators, with an embedding of its own, and layers counted by their inputs."""

    layer = "layers.0."
    residual_normed = True

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        own = torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(8))
        self.weights["embed_tokens.weight"] = own

    def config(self) -> dict:
        return {
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": CONFIG,
            "draft_vocab_size": ROWS,
            "eagle_aux_hidden_state_layer_ids": list(KEPT),
            "norm_before_residual": True,
        }

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        every = self.target.model.embed_tokens.weight
        numbers = torch.cdist(tokens, every).argmin(1)
        return super().forward(self.weights["embed_tokens.weight"][numbers], states)


@pytest.fixture(scope="module")
def target(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), path)


def save_target(folder: Path, tokenizer: Path) -> Path:
    config = transformers.LlamaConfig(
        **{**CONFIG, "num_hidden_layers": LAYERS, "max_position_embeddings": 512},
        bos_token_id=None,
        eos_token_id=256,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return folder


HEADS_OF: dict[str, Callable[[Path], Reference]] = {"eagle": Reference, "eagle3": Eagle3, "speculators": Speculators}
Made = tuple[str, Path, Reference]


@pytest.fixture(scope="module", params=HEADS_OF)
def head(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Method, folder and reference of a head."""
    reference = HEADS_OF[request.param](target)
    method = "eagle" if request.param == "eagle" else "eagle3"
    return method, reference.save(tmp_path_factory.mktemp("head") / "head"), reference


def engine(target: Path, head: Made | None, kernels: str, **more) -> LLM:
    own = {} if head is None else {"draft_model": str(head[1]), "draft_tokens": 3}
    return lookup.engine(target, "off" if head is None else head[0], kernels, **{**own, **more})


@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_are_those_of_the_reference(kernels: str, target: Path, head: Made, monkeypatch: pytest.MonkeyPatch):
    (params,) = lookup.requests("greedy", 1)
    params = msgspec.structs.replace(params, max_tokens=14)
    prompts = [PROMPT, PROMPT[2:12]]
    with engine(target, None, kernels) as llm:
        expected = llm.generate(prompts, params)
    # Several chunks of a prompt, and several rows: each has the hidden states of its own tokens.
    with engine(target, head, kernels, max_step_tokens=16) as llm:
        made = spied(llm, monkeypatch)
        assert lookup.seen(llm.generate(prompts, params)) == lookup.seen(expected)
    assert check_drafts(made, prompts, expected, head[2].drafts) > 30


def test_drafts_of_a_target_whose_embedding_is_in_blocks_of_ggml(target: Path, tmp_path: Path, monkeypatch):
    """The head looks up rows of the target's table."""
    reference, kind = Eagle3(target), GgmlType.Q5_0
    folder = tmp_path / "target"
    folder.mkdir()
    write_gguf(folder / "m.gguf", reference.target, Kind("llama"), types={"token_embd": kind})
    shutil.copy(target / "tokenizer.json", folder)
    values = torch.from_numpy(dequantize(drawn_blocks((VOCAB, HIDDEN), kind), kind))
    reference.target.model.embed_tokens.weight.data.copy_(values)
    head = "eagle3", reference.save(tmp_path / "head"), reference
    params = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=8)
    with engine(folder, None, best()) as llm:
        expected = llm.generate([PROMPT], params)
    with engine(folder, head, best()) as llm:
        made = spied(llm, monkeypatch)
        assert lookup.seen(llm.generate([PROMPT], params)) == lookup.seen(expected)
    assert check_drafts(made, [PROMPT], expected, reference.drafts) > 5


def quantized(head: Made, folder: Path) -> Made:
    """Return a copy of a head whose layer is in 4 bits (GPTQ); its reference has the dequantized values."""
    reference, own = head[2], dict(head[2].tensors())
    for name, matrix in [*reference.weights.items()]:
        if name.startswith(reference.layer) and matrix.dim() == 2:
            packed = whole(matrix, 4, 16)
            reference.weights[name] = packed.restored()
            del own[name]
            own |= {f"{name.removesuffix('.weight')}.{part}": one for part, one in gptq(packed).items()}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
    return changed(head, folder, own, quantization_config=settings)


@pytest.mark.parametrize("kind", thinned(["eagle", "eagle3"], ["eagle3"]))
def test_drafts_of_a_quantized_head(kind: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference = HEADS_OF[kind](target)
    head = quantized((kind, reference.save(tmp_path / "plain"), reference), tmp_path / "head")
    params = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=10)
    with engine(target, None, best()) as llm:
        expected = llm.generate([PROMPT], params)
    with engine(target, head, best()) as llm:
        made = spied(llm, monkeypatch)
        assert lookup.seen(llm.generate([PROMPT], params)) == lookup.seen(expected)
    assert check_drafts(made, [PROMPT], expected, reference.drafts) > 10


@pytest.mark.parametrize("kind", ["modelopt-nvfp4", "bnb-nf4"])
def test_projection_of_the_states_may_be_quantized(kind: str, target: Path, tmp_path: Path):
    """Its tensor has another number of columns than states."""
    head = "eagle3", Eagle3(target).save(tmp_path / "plain"), None
    own = load_file(head[1] / "model.safetensors")
    form = (FLOAT_KINDS | INTEGER_KINDS)[kind]
    written = form.write(form.quantize(own.pop("fc.weight")))
    own |= {f"fc.{name}": tensor.contiguous() for name, tensor in written.items()}
    made = changed(head, tmp_path / "head", own, quantization_config=form.settings)
    found = read_eagle(str(made[1]), read_checkpoint(target), "eagle3")
    assert found.quantization is not None and [*found.quantization.formats] == ["model.layers.0.fc"]


def test_drafts_with_triton_kernels(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    reference = Eagle3(target)
    head = "eagle3", reference.save(tmp_path / "head"), reference
    params = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=5)
    prompts = [PROMPT[:9], PROMPT[2:6]]
    with engine(target, None, best()) as llm:
        expected = llm.generate(prompts, params)
    with engine(target, head, "triton", max_step_tokens=8, dtype="float32") as llm:
        made = spied(llm, monkeypatch)
        assert lookup.seen(llm.generate(prompts, params)) == lookup.seen(expected)
    assert check_drafts(made, prompts, expected, reference.drafts) >= 6


REQUESTS = ("greedy", "sampled", "truncated", "penalties", "json", "stop string", "allowed tokens", "thinking budget")


@pytest.mark.parametrize(("name", "head"), paired(REQUESTS, [*HEADS_OF]), indirect=["head"])
@pytest.mark.sampled(3)
def test_replies_with_a_head_are_those_without(name: str, target: Path, head: Made):
    """Prompts are computed in chunks, more requests arrive than run, and the pages are too few for all of them."""
    wanted, prompts = lookup.requests(name, 4), [PROMPT[: 5 * number + 2] for number in range(4)]
    with engine(target, None, best()) as llm:
        expected = lookup.seen(llm.generate(prompts, wanted))
    block = (LAYERS + 1) * 2 * 4 * 2 * 8 * 4  # layers, keys and values, tokens, heads, elements, bytes
    few = {"kv_bytes": 31 * block, "max_context": 100, "max_step_tokens": 16, "max_running": 3}
    with engine(target, head, best(), **few) as llm:
        assert lookup.seen(llm.generate(prompts, wanted)) == expected
        counters = lookup.counters(llm)
        assert counters.draft_tokens >= counters.accepted_tokens and counters.draft_tokens > 0
        if name in ("sampled", "penalties"):
            assert counters.accepted_tokens > 0 and counters.preemptions > 0
        again = llm.generate(prompts[-1:], wanted[-1:])
        assert lookup.seen(again) == expected[-1:]


@pytest.mark.sampled(3)
def test_a_cached_prefix_keeps_replies_and_drafts(target: Path, head: Made):
    params = lookup.requests("sampled", 1)[0]
    with engine(target, head, best()) as llm:
        (first,) = llm.generate([PROMPT], params)
        prompt = (*first.prompt_ids, *first.ids)
        (found,) = llm.generate([prompt], params)
        assert found.timing.cached_tokens > len(PROMPT)
    with engine(target, head, best(), prefix_cache=False) as fresh:
        (uncached,) = fresh.generate([prompt], params)
    assert found.ids == uncached.ids
    # The last cached position was computed with another next token.
    assert abs(found.timing.accepted_tokens - uncached.timing.accepted_tokens) <= 3


@pytest.mark.sampled(3)
def test_an_interrupted_reply_resumes_with_drafts(target: Path, head: Made):
    params = lookup.requests("sampled", 1)[0]
    with engine(target, None, best()) as llm:
        whole = llm.generate([PROMPT], params)[0].ids
    with engine(target, head, best()) as llm:
        submit, _ = llm._submit(PROMPT, params)
        llm._loop.post([msgspec.structs.replace(submit, emitted=tuple(whole[:23]))])
        ids, ended = list[int](), False
        while not ended:
            deltas = [one for got in llm._received() if isinstance(got, Output) for one in got.deltas]
            ids += [token for delta in deltas for token in delta.ids]
            ended = any(delta.finish for delta in deltas)
        assert ids == whole[23:] and drafted(llm)[0] > 20


@pytest.mark.sampled(2)
def test_rank_0_drafts_with_the_whole_head(target: Path, head: Made):
    """A rank has a share of the target's tables, so the head has its own."""
    wanted = lookup.requests("sampled", 2)
    replies, counts = [], []
    for one, ranks in ((None, 1), (head, 1), (head, 2)):
        with engine(target, one, best(), tensor=ranks) as llm:
            replies.append(lookup.seen(llm.generate([PROMPT] * 2, wanted)))
            counts.append(drafted(llm))
    assert replies[0] == replies[1] == replies[2] and counts[0] == (0, 0) and counts[1][1] > 0
    assert counts[2] == counts[1], "the ranks' sums are rounded differently, but drafts seldom change"


@pytest.mark.sampled(3)
def test_a_recording_with_a_head_replays_exactly(target: Path, head: Made, tmp_path: Path, capsys):
    file = tmp_path / "record"
    with engine(target, head, best(), record=str(file), record_size=1 << 18) as llm:
        llm.generate([PROMPT] * 3, [*lookup.requests("json", 1), *lookup.requests("sampled", 2)])
    assert replay([str(file)]) == 0
    assert "all plans equal" in capsys.readouterr().out


def test_a_tied_head_and_biases_of_the_target_are_shared(path: Path, tmp_path: Path):
    """An EAGLE head computes logits with the head of the target, here the embedding."""
    config = transformers.Qwen2Config(
        **{**CONFIG, "model_type": "qwen2", "num_hidden_layers": 2}, tie_word_embeddings=True, bos_token_id=None
    )
    torch.manual_seed(1)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "target")
    shutil.copy(path / "tokenizer.json", tmp_path / "target")
    reference = Reference(path)
    reference.target = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "target")
    head = "eagle", reference.save(tmp_path / "head"), reference
    params = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=8)
    with engine(tmp_path / "target", head, best(), max_context=60) as llm, pytest.MonkeyPatch.context() as patch:
        made = spied(llm, patch)
        replies = llm.generate([PROMPT], params)
    assert check_drafts(made, [PROMPT], replies, reference.drafts) > 8


@pytest.mark.parametrize("ranks", thinned([1, 2], kept=[2]))
def test_an_embedding_in_blocks_of_gguf_is_shared(ranks: int, path: Path, target: Path, tmp_path: Path):
    """Rank 0 of several reads it whole for the head."""
    reference, kind = Reference(target), gguf.GGMLQuantizationType.Q5_0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_gguf, "random_model", lambda *given, **more: reference.target)
        test_gguf.write(tmp_path / "target", {"embed": kind})
    shutil.copy(path / "tokenizer.json", tmp_path / "target")
    table = reference.target.model.embed_tokens.weight.data
    table.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(table.numpy(), kind), kind)))
    head = "eagle", reference.save(tmp_path / "head"), reference
    params = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=8)
    with engine(tmp_path / "target", head, best(), tensor=ranks) as llm, pytest.MonkeyPatch.context() as patch:
        made = spied(llm, patch)
        replies = llm.generate([PROMPT], params)
    assert check_drafts(made, [PROMPT], replies, reference.drafts) > 8


def test_layers_of_an_eagle3_head(tmp_path: Path, target: Path):
    model = read_checkpoint(target).model
    key = "eagle_aux_hidden_state_layer_ids"

    def layers(config: dict, count: int) -> tuple[int, ...]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return kept_layers(tmp_path, replace(model, blocks=model.blocks[:1] * count))

    assert layers({}, 32) == (2, 16, 29)
    assert layers({"eagle_config": {key: [1, 46, 90]}}, 94) == (2, 47, 91), "SGLang counts outputs"
    assert layers({key: [2, 47, 91]}, 94) == (2, 47, 91), "vLLM counts inputs"
    for wrong in ({key: [1, 5, 95]}, {key: [3, 2, 4]}, {key: ["1", 2, 3]}, {key: [1, 1, 2]}):
        with pytest.raises(CheckpointError, match="must be different, in order, and between 0 and the 94 layers"):
            layers(wrong, 94)


def changed(head: Made, folder: Path, tensors: dict[str, Tensor] | None = None, **config) -> Made:
    """Return a copy of a head with other keys or tensors."""
    shutil.copytree(head[1], folder)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return head[0], folder, head[2]


def test_heads_of_other_models_are_refused(target: Path, tmp_path: Path):
    eagle = "eagle", Reference(target).save(tmp_path / "eagle"), None
    eagle3 = "eagle3", Eagle3(target).save(tmp_path / "eagle3"), None
    stored = load_file(eagle3[1] / "model.safetensors")
    without = {name: one for name, one in stored.items() if name != "d2t"}
    narrow = {**stored, "fc.weight": stored["fc.weight"][:, : 2 * HIDDEN].contiguous()}
    more = {**stored, "midlayer.self_attn.q_norm.weight": torch.ones(DIM)}
    wrong = [
        (changed(eagle, tmp_path / "1", hidden_size=64), "hidden_size is 64, and 32 in the target"),
        (changed(eagle3, tmp_path / "2", hidden_size=64), "whose embedding the head reads"),
        (changed(eagle3, tmp_path / "3", vocab_size=300), "vocab_size is 300, and 263 in the target"),
        (changed(eagle3, tmp_path / "4", without), "draft_vocab_size is 141, but the checkpoint has no tensor d2t"),
        (changed(eagle3, tmp_path / "5", narrow), "fc reads the states of 2 layers, and config.json selects 3"),
        (changed(eagle3, tmp_path / "6", more), "has model.*q_norm.weight, which the declared model does not use"),
        (changed(eagle3, tmp_path / "7", norm_before_fc=True), "norm_before_fc is not supported"),
        (changed(eagle3, tmp_path / "8", quantization_config={"quant_method": "none"}), "quantized .none., which is"),
        (("eagle", eagle3[1], None), "LlamaForCausalLMEagle3; supported for speculation=eagle are"),
        (("eagle3", tmp_path / "nothing", None), "no such directory; set draft_model to the folder of the head"),
    ]
    for head, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            engine(target, head, "torch")
    with pytest.raises(ConfigError, match="the methods draft, eagle, eagle3 need draft_model"):
        lookup.engine(target, "eagle3", "torch")
