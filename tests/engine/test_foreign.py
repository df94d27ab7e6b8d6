"""Decoders that only transformers declares, run by the whole engine and compared with transformers in float32.

Steps and blocks are small and requests are concurrent: prompts are chunked, prefixes are shared, and requests
are preempted.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.api.config import TaskConfig
from engine.api.errors import CheckpointError, ConfigError, TaskError, UnknownArchitecture
from engine.kv.layout import layout
from engine.llm import LLM, Params
from engine.models import foreign
from engine.models.checkpoint import assume_checkpoint, read_checkpoint
from tests.tiers import thinned

VOCAB = 97
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 66,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **SPECIAL,
}
BART = {"vocab_size": VOCAB, "d_model": 48, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4,
        "encoder_attention_heads": 4, "decoder_ffn_dim": 66, "encoder_ffn_dim": 66, "max_position_embeddings": 64,
        "is_decoder": True, "is_encoder_decoder": False, **SPECIAL}  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
# Learned positions and no interface for attention; two softmaxes per head; windows and a softcap; capped logits, norms
# without weights; ternary weights; no argument for positions, so that rows are computed alone; recurrent states.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biogpt": ("BioGpt", {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
    "diffllama": ("DiffLlama", {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "vaultgemma": ("VaultGemma", {**SIZES, "head_dim": 8, "sliding_window": 5, "layer_types": WINDOWS}),
    "nanochat": ("NanoChat", {**SIZES}),
    "bitnet": ("BitNet", {**SIZES}),
    "bart": ("Bart", {**BART}),
    "rwkv": ("Rwkv", {**SPECIAL, "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}),
    "zamba": ("Zamba", {**SIZES, "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1,
                        "attention_hidden_size": 96, "attention_head_dim": 16, "mamba_d_state": 8, "n_mamba_heads": 2,
                        "use_mamba_kernels": False, "num_key_value_heads": 6}),
}  # fmt: skip


def save(folder: Path, name: str, **more: Any) -> Any:
    """Write a tiny random checkpoint and return the model in transformers."""
    kind, settings = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**settings, **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def engine(folder: Path, **more: Any) -> LLM:
    small = {"block_tokens": 4, "max_context": 48, "kv_bytes": 1 << 20, "threads": 1}
    return LLM(folder, **{**small, "max_step_tokens": 7, "max_running": 4, **more})


def greedy(count: int) -> Params:
    return Params(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)


def check(model: Any, made: Any) -> None:
    """Compare tokens and log probabilities with transformers, which runs without a cache."""
    with torch.no_grad():
        ids = torch.tensor([[*made.prompt_ids, *made.ids]])
        expected = model(ids, use_cache=False).logits[0, len(made.prompt_ids) - 1 : -1].float().log_softmax(-1)
    assert made.ids == expected.argmax(-1).tolist()
    found = [one.logprob for one in made.logprobs]
    assert found == pytest.approx([expected[at, token].item() for at, token in enumerate(made.ids)], abs=2e-4)


@pytest.mark.parametrize("name", thinned(CASES, [name for name in CASES if name != "zamba"]))
def test_chunks_batches_and_cached_prefixes_change_nothing(tmp_path: Path, name: str) -> None:
    model = save(tmp_path, name)
    shared = tuple(range(5, 18))
    prompts = [(3,), shared + (40,), (9, 11, 4, 7), shared + tuple(range(50, 60)), tuple(range(20, 49))]
    with engine(tmp_path) as llm:
        for _ in range(2):  # the second time, prefixes are cached
            for made in llm.generate(prompts, greedy(9)):
                check(model, made)


def test_preempted_requests_continue_as_before(tmp_path: Path) -> None:
    model = save(tmp_path, "vaultgemma")
    form = layout(read_checkpoint(tmp_path).model, block_tokens=4, element_bytes=4)
    tight = (form.blocks_for(48, 7) + 1) * form.block_bytes
    with engine(tmp_path, kv_bytes=tight) as llm:
        for made in llm.generate([tuple(range(3, 23)), tuple(range(30, 50)), tuple(range(60, 80))], greedy(20)):
            check(model, made)


def test_planned_weights_are_loaded_weights(tmp_path: Path) -> None:
    from engine.lowering.footprint import Holder, footprint, part_bytes

    save(tmp_path, "nanochat")
    checkpoint = read_checkpoint(tmp_path)
    planned = part_bytes(footprint(checkpoint.model, checkpoint.tensors, None, Holder("float32")))
    with engine(tmp_path) as llm:
        assert planned == {"model": llm._worker.memory_usage["model"]}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path, "nanochat")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith("layers.1.mlp.fc1.weight")]
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        engine(tmp_path)


def test_code_that_ignores_its_cache_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "nanochat")
    from engine.layers import foreign as layers

    monkeypatch.setattr(layers.RowPages, "exchange", lambda self, layer, keys, values: (keys, values))
    with pytest.raises(CheckpointError, match="does not work with paged keys and values"):
        engine(tmp_path)


def rewritten(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_not_supported_is_refused_before_the_start(tmp_path: Path) -> None:
    save(tmp_path / "a", "nanochat")
    with pytest.raises(TaskError, match="supported is generate"):
        read_checkpoint(tmp_path / "a", task=TaskConfig(task="embed"))
    with pytest.raises(ConfigError, match="one rank"):
        engine(tmp_path / "a", tensor=2)
    for coded in ("int8", "int4"):  # pages with scales, which would be lost
        with pytest.raises(ConfigError, match=f"kv_dtype={coded}.*at least 16 bits"):
            engine(tmp_path / "a", kv_dtype=coded)
    with pytest.raises(CheckpointError, match="needs its safetensors files"):
        assume_checkpoint(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointError, match="plain weights only"):
        read_checkpoint(rewritten(tmp_path / "b", quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(UnknownArchitecture, match="recurrent states"):
        read_checkpoint(rewritten(tmp_path / "b", quantization_config=None, architectures=["Rwkv8ForCausalLM"]))


def test_without_transformers_the_architecture_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "nanochat")
    monkeypatch.setattr(foreign, "_decoders", lambda: {})
    with pytest.raises(UnknownArchitecture, match="NanoChatForCausalLM"):
        read_checkpoint(tmp_path)


def test_a_checkpoint_is_planned_without_importing_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    save(tmp_path, "nanochat")
    code = (
        "import sys; from engine.models.checkpoint import read_checkpoint; "
        f"read_checkpoint({str(tmp_path)!r}); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("settings", "heads", "width"),
    [
        ({"num_key_value_heads": 2}, 2, 8),
        ({"head_dim": 20}, 6, 20),
        ({"multi_query": True}, 1, 8),
        ({"kv_lora_rank": 9, "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 12}, 1, 9),
    ],
)
def test_shapes_of_cached_keys_and_values(settings: dict[str, Any], heads: int, width: int) -> None:
    plain = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 9}
    found = foreign.declare_foreign({"architectures": ["NanoChatForCausalLM"], **plain, **settings})
    form = layout(found, block_tokens=4, element_bytes=4)
    assert (form.kv_heads, form.head_dim) == (heads, width)


def test_scalings_that_depend_on_the_longest_sequence_end_at_the_original_context() -> None:
    scaled = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32}}
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 9}
    config = {"architectures": ["NanoChatForCausalLM"], **sizes, "max_position_embeddings": 64}
    assert foreign.declare_foreign(config).max_context == 64
    assert foreign.declare_foreign({**config, **scaled}).max_context == 32


def calls(llm: LLM) -> list[tuple[int, int]]:
    """Note the rows and tokens of each call of transformers' code."""
    found: list[tuple[int, int]] = []
    code = llm._worker._runner._text_model._decoder
    compute = code.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        found.append(tuple((arguments or (options["input_ids"],))[0].shape))
        return compute(*arguments, **options)

    code.forward = forward
    return found


@pytest.mark.parametrize(("name", "joined"), [("nanochat", True), ("bart", False)])
def test_rows_with_equal_numbers_of_tokens_are_one_call(tmp_path: Path, name: str, joined: bool) -> None:
    """Bart computes positions from the longest row, so its rows are computed alone."""
    save(tmp_path, name)
    with engine(tmp_path) as llm:
        found = calls(llm)
        llm.generate([(3, 4), (5, 6, 7, 8)], greedy(5))
    assert ((2, 1) in found) == joined


def test_recurrent_decoders_keep_only_the_ids_of_tokens(tmp_path: Path) -> None:
    save(tmp_path, "rwkv")
    model = read_checkpoint(tmp_path).model
    assert model.foreign is not None and model.foreign.recomputes
    assert layout(model, block_tokens=4, element_bytes=4).block_bytes == 4 * 2 * foreign.ID_WIDTH * 4
    with engine(tmp_path) as llm:
        found = calls(llm)
        llm.generate([tuple(range(3, 8))], greedy(3))
    assert (1, 7) in found  # the complete sequence


def test_a_call_has_rows_with_equal_numbers_of_tokens_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.layers import foreign as layers

    monkeypatch.setattr(layers, "JOINED_POSITIONS", 20)
    assert [*layers._calls([1, 7, 1, 1, 1], [9, 0, 3, 0, 5])] == [[0, 2], [3, 4], [1]]
    assert [*layers._calls([1, 1], [30, 2])] == [[0], [1]]
