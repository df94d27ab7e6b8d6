"""Every cell of docs/compatibility.md on tiny models: supported cells start and generate; unsupported cells are
refused by the plan, and by an engine that is started in spite of it. In cells with exact numbers, tokens equal those
from transformers. Cells of a GPU are planned for a described GPU; their engines run in Triton's interpreter here, and
on a real GPU if there is one."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, load
from appliance.constraints.facts import model_facts
from appliance.constraints.table import COMPILED, TABLES, Cell, cells, machine
from appliance.hardware.machine import Machine, read_machine
from appliance.planning.plan import plan
from engine.api.config import EngineConfig
from engine.api.errors import EngineError
from engine.api.messages import Pooling
from engine.arguments import engine_config
from engine.llm import LLM, Params
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import BF16_VARIANTS, best, usable
from kernels.jit import installed, interpreted
from tests.engine import sourced as sourced_models
from tests.engine.configs import arguments_of, with_arguments
from tests.engine.fp8_writers import FP8_KINDS
from tests.engine.quantized_writers import KINDS
from tests.engine.quantized_writers import write as write_quantized
from tests.tiers import thinned

transformers_logging.disable_progress_bar()

PROMPTS = [[5, 17, 80, 3], [9, 41]]
TOKENS = 5
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EAGER = {"attn_implementation": "eager"}
CELLS = [cell for table in TABLES for cell in cells(table)]
ON_CPU = [cell for cell in CELLS if cell.situation.written["device"] == "cpu"]
ON_GPU = [cell for cell in CELLS if cell.situation.written["device"] == "cuda"]
INTERPRETED = [cell for cell in ON_GPU if cell.situation.written["kernels"] == "triton"]


@dataclass
class Saved:
    """A checkpoint folder, what to write in a manifest for it, and the numbers of transformers for it."""

    path: Path
    sets: tuple[str, ...] = ()
    model: Callable[[], Any] | None = None
    exact: bool = True  # with float32 and torch; False: weights are whole numbers to compiled kernels
    vector: Callable[[list[int]], torch.Tensor] | None = None  # of a prompt, where the model pools
    replies: Callable[[], list[list[int]]] | None = None  # to the prompts, where they are sources

    def greedy(self) -> list[list[int]]:
        assert self.model is not None
        model, found = self.model(), [list(prompt) for prompt in PROMPTS]
        with torch.no_grad():
            for ids in found:
                for _ in range(TOKENS):
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return [ids[-TOKENS:] for ids in found]


def save(folder: Path, architecture: str = "Qwen3", **more: Any) -> Saved:
    sizes = {**SIZES, **({"head_dim": 8} if architecture == "Qwen3" else {}), **more}
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    torch.manual_seed(11)
    made = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            # 0.25: near logits would let a rounding in another order choose another token
            parameter.copy_((torch.randn_like(parameter) * 0.25 + (parameter if parameter.ndim == 1 else 0)).bfloat16())
    made.to(torch.bfloat16).save_pretrained(folder)
    made.to(torch.float32)
    return Saved(folder, model=lambda: made)


def pooled(folder: Path, kind: str, pool: Callable[[torch.Tensor], torch.Tensor], *sets: str) -> Saved:
    classed = getattr(transformers, kind)
    torch.manual_seed(11)
    config = classed.config_class(**SIZES, **({"head_dim": 8} if kind.startswith("Qwen3") else {}))
    made = transformers.AutoModel.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.25 + (parameter if parameter.ndim == 1 else 0)).bfloat16())
    made.to(torch.bfloat16).save_pretrained(folder)
    made.to(torch.float32)

    def vector(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.nn.functional.normalize(pool(made(torch.tensor([ids])).last_hidden_state[0]), dim=0)

    return Saved(folder, sets=sets, vector=vector)


def declared(folder: Path, change: str) -> Saved:
    """A Llama whose attention is changed by its folder's own declaration."""
    saved = save(folder, "Llama")
    (folder / "slipway_model.py").write_text(DECLARATION.replace("CHANGE", change))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OwnLlama"]}))
    return replace(saved, sets=("model.trust_remote_code=true",), model=None)


DECLARATION = """
from dataclasses import replace
from engine.models import llama
from engine.models.parts import Alibi, Attention, LayerNorm

ARCHITECTURES = ("OwnLlama",)


def changed(branch):
    body = branch.body
    return replace(branch, body=replace(body, CHANGE)) if isinstance(body, Attention) else branch


def declare(config):
    model = llama.declare({**config, "architectures": ["LlamaForCausalLM"]})
    return replace(model, blocks=tuple(tuple(map(changed, block)) for block in model.blocks))
"""


def sinks(folder: Path) -> Saved:
    saved, file = declared(folder, "sinks=True"), folder / "model.safetensors"
    more = {f"model.layers.{layer}.self_attn.sinks": torch.ones(4) for layer in range(2)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    return saved


def normed(folder: Path) -> Saved:
    norm = 'qk_norm=LayerNorm(size=8, eps=1e-6, bias=False), qk_norm_span="all"'
    saved, file = declared(folder, norm), folder / "model.safetensors"
    sizes = {"q_norm": 32, "k_norm": 16}
    more = {f"model.layers.{i}.self_attn.{n}.weight": torch.ones(s) for i in range(2) for n, s in sizes.items()}
    save_file(load_file(file) | more, file, {"format": "pt"})
    return saved


def uneven(folder: Path) -> Saved:
    sizes = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "sliding_window": 5}
    return save(folder, "Gemma4Text", **sizes)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def mixed_expert_formats(folder: Path) -> Saved:
    """Experts in bf16, one of them in float32: the same numbers."""
    saved, file = save(folder, "Mixtral", **EXPERTS), folder / "model.safetensors"
    kept = {name: t.float() if ".experts.1." in name else t for name, t in load_file(file).items()}
    save_file(kept, file, {"format": "pt"})
    return saved


def gptq(folder: Path) -> Saved:
    folder.mkdir()
    made = write_quantized(folder, KINDS["gptq-32-zeros"])
    return Saved(made.path, model=made.model, exact=False)


def wide_groups(folder: Path) -> Saved:
    """256 inputs of the MLP's down projection are two groups, but the heads' 128 are one."""
    folder.mkdir()
    made = write_quantized(folder, KINDS["gptq-128"])
    return Saved(made.path, model=made.model, exact=False)


def fp8(folder: Path) -> Saved:
    folder.mkdir()
    made = write_quantized(folder, FP8_KINDS["autofp8-dynamic"])
    return Saved(made.path, model=made.model, exact=False)


def wide_blocks(folder: Path) -> Saved:
    """256 inputs of the output projection, and 512 of the down projection, are complete blocks for two ranks."""
    folder.mkdir()
    made = write_quantized(folder, FP8_KINDS["blocks"], hidden_size=256, intermediate_size=512)
    return Saved(made.path, model=made.model, exact=False)


def narrow_blocks(folder: Path) -> Saved:
    folder.mkdir()
    made = write_quantized(folder, FP8_KINDS["blocks"])
    return Saved(made.path, model=made.model, exact=False)


def encoder_decoder(folder: Path) -> Saved:
    made = sourced_models.save(folder)

    def greedy() -> list[list[int]]:
        return [made.greedy(prompt, TOKENS) for prompt in PROMPTS]

    roomy = "engine.scheduling.max_step_tokens=80"  # a source of 64 tokens, and one of each running request
    return Saved(made.path, sets=(roomy,), replies=greedy)


def relative_biases(folder: Path) -> Saved:
    made = sourced_models.save(folder, "flan-t5", vocab_size=128)

    def greedy() -> list[list[int]]:
        return [made.greedy(prompt, TOKENS, begins=[0]) for prompt in PROMPTS]

    return Saved(made.path, sets=("engine.scheduling.max_step_tokens=80",), replies=greedy)


def gguf(folder: Path) -> Saved:
    from tests.engine.layers import test_gguf

    path = test_gguf.write(folder, {"proj": test_gguf.Type.TQ2_0}, hidden_size=256)
    return Saved(path if path.is_dir() else path.parent)


RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mlp_only_layers": [0, 1],
}

LATENT = {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "qk_rope_head_dim": 8}  # fmt: skip
MODELS: dict[str, Callable[[Path], Saved]] = {
    "sliding windows and soft caps": lambda folder: save(
        folder, "Gemma2", head_dim=8, sliding_window=3, attn_logit_softcapping=2.0, final_logit_softcapping=9.0
    ),
    "attention sinks": sinks,
    "ALiBi": lambda folder: save(folder, "Bloom"),
    "ALiBi in cross-attention": lambda folder: declared(folder, "alibi=Alibi(), source=True"),
    "chunks in bidirectional attention": lambda folder: declared(folder, "chunk=4, causal=False"),
    "multi-head latent attention": lambda folder: save(folder, "Youtu", **LATENT),
    "latents of 520 elements": lambda folder: save(folder, "Youtu", **{**LATENT, "kv_lora_rank": 520}),
    "transformers' own code, int8 pages": lambda folder: save(folder, "NanoChat"),
    "int4 pages of heads of 6 elements": lambda folder: save(folder, "Llama", head_dim=6),
    "heads of 12": lambda folder: save(folder, "Llama", head_dim=12),
    "heads of 264": lambda folder: save(folder, "Llama", head_dim=264),
    "65 query heads to a KV head": lambda folder: save(
        folder, "Llama", hidden_size=520, num_attention_heads=65, num_key_value_heads=1
    ),
    "an activation that only torch has": lambda folder: save(folder, "Llama", hidden_act="relu2"),
    "an encoder that pools": lambda folder: pooled(
        folder, "BertModel", lambda x: x.mean(0), "hardware.kv_cache_memory=auto"
    ),
    "a decoder that pools": lambda folder: pooled(folder, "Qwen3Model", lambda x: x[-1]),
    "recurrent layers": lambda folder: save(folder, "Qwen3Next", **RECURRENT),
    "an encoder-decoder model": encoder_decoder,
    "relative position biases": relative_biases,
    "a mixture of experts": lambda folder: save(folder, "Mixtral", **EXPERTS),
    "experts of one layer in several types": mixed_expert_formats,
    "gptq, awq or compressed-tensors": gptq,
    "fp8": fp8,
    "GGUF in types that are dequantized": gguf,
    "2 ranks of gptq, cut between groups": gptq,
    "2 ranks of gptq, cut within one": wide_groups,
    "2 ranks of fp8, cut between blocks": wide_blocks,
    "2 ranks of fp8, cut within one": narrow_blocks,
    "layers with different KV heads": uneven,
    "a layer norm over all heads of a projection": normed,
    "": save,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], Saved]:
    """The checkpoint of a cell, made once."""
    made: dict[str, Saved] = {}

    def get(cell: Cell) -> Saved:
        name = model_of(cell)
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp("cells") / "model")
        return made[name]

    return get


def model_of(cell: Cell) -> str:
    """The row of a cell whose model it has; of `as above, rounded`, the row above."""
    if cell.table.name not in ("models", "ranks"):
        return ""
    rows = list(cell.table.rows)
    at = rows.index(cell.row)
    label = rows[at - 1].label if cell.row.label.startswith("as above") else cell.row.label
    return label if label in MODELS else ""


def values(cell: Cell, own: Saved) -> dict[str, Any]:
    """Return the settings of a cell, with this CPU's kernels and this checkpoint's context. The best kernels compute in
    bfloat16 on some CPUs only; the tables are about the others."""
    found = dict(cell.situation.written)
    if found.get("kernels") == COMPILED:
        in_float32 = [name for name in usable() if name not in BF16_VARIANTS]
        found["kernels"] = in_float32[-1] if found.get("dtype") == "bfloat16" else best()
    if "max_context" in found:
        found["max_context"] = read_checkpoint(own.path).model.max_context + 1
    return found


KEYS = {
    "device": "hardware.device",
    "kernels": "hardware.kernels",
    "dtype": "model.dtype",
    "weights": "quantization.weights",
    "kv_cache": "quantization.kv_cache",
    "graphs": "hardware.graphs",
    "batch_invariant": "hardware.batch_invariant",
    "block_tokens": "engine.cache.block_tokens",
    "max_context": "model.max_context",
    "data": "parallelism.data",
    "tensor": "parallelism.tensor",
}
SMALL = (
    "hardware.threads=1",
    "hardware.kv_cache_memory=1MiB",
    "engine.scheduling={max_running: 4, max_step_tokens: 8}",
)


def planned(cell: Cell, own: Saved, host: Machine, folder: Path) -> EngineConfig:
    """Return the engine configuration that `slipway check` plans. Raise Refused if it refuses."""
    (folder / "m.yaml").write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {own.path}}}}}\n")
    sets = [f"{KEYS[name]}={'auto' if v == 'stored' else str(v).lower()}" for name, v in values(cell, own).items()]
    options = tuple(Option("--set", *one.split("=", 1)) for one in (*sets, *SMALL, *own.sets))
    checkpoint = read_checkpoint(own.path, bool(own.sets))
    return plan(load(Given(folder / "m.yaml", options)), checkpoint, host).engines[0]


def generate(config: EngineConfig) -> list[list[int]]:
    fields = arguments_of(config)
    with LLM(config.model.path, **fields) as llm:
        found = llm.generate(PROMPTS, Params(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    assert [one.error for one in found] == [None] * len(PROMPTS)
    assert all(token < llm.vocab for one in found for token in one.ids)
    return [one.ids for one in found]


def forced(cell: Cell, own: Saved, *, device: str) -> EngineConfig:
    """The cell's engine without a plan that would refuse it."""
    requested = values(cell, own)
    dtype = requested.get("dtype", "bfloat16" if requested["kernels"] == "triton" else "float32")
    return engine_config(
        model=str(own.path),
        device=device,  # type: ignore[arg-type]
        kernels=requested["kernels"],
        dtype=dtype,
        kv_dtype=requested.get("kv_cache", dtype),
        weights=requested.get("weights", "stored"),
        invariant=requested.get("batch_invariant", False),
        graph_sizes=(1, 2) if requested.get("graphs") else (),
        max_context=requested.get("max_context", 64),
        tensor=requested["tensor"],
        trust_remote_code=bool(own.sets),
        kv_bytes=2**20,
        max_running=4,
        max_step_tokens=8,
    )


def is_exact(config: EngineConfig, own: Saved) -> bool:
    """Return True if the engine and transformers differ only in the order of float32 sums."""
    held = not own.exact and config.hardware.kernels != "torch"
    return (config.model.dtype, config.quantization.kv_cache, config.quantization.weights) == (
        "float32",
        "float32",
        "stored",
    ) and not held


def here() -> Machine:
    return replace(read_machine(gpus=False), kernels=usable())


def check_pools(config: EngineConfig, own: Saved) -> None:
    fields = arguments_of(config)
    with LLM(config.model.path, **fields) as llm:
        found = llm.pool(PROMPTS, Pooling("embed"))
    assert own.vector is not None
    for ids, vector in zip(PROMPTS, found, strict=True):
        # with bf16 as far as its products are rounded
        limit = 1e-4 if is_exact(config, own) else 5e-2
        torch.testing.assert_close(torch.tensor(vector), own.vector(ids), atol=limit, rtol=0)


def check_generates(config: EngineConfig, own: Saved) -> None:
    if own.vector is not None:
        check_pools(config, own)
        return
    found = generate(config)
    assert [len(ids) for ids in found] == [TOKENS] * len(PROMPTS)
    if own.model is not None and is_exact(config, own):
        assert found == own.greedy()
    if own.replies is not None and is_exact(config, own):
        assert found == own.replies()


def needs_kernels(cell: Cell) -> None:
    if cell.situation.written["kernels"] == COMPILED and best() == "torch":
        pytest.skip("no compiled kernels are installed")


def test_test_models_have_the_features_of_their_rows(saved: Callable[[Cell], Saved]) -> None:
    """The facts that the table states are those that are read of the tiny checkpoint, as far as rules ask."""
    for cell in CELLS:
        if model_of(cell):
            own = saved(cell)
            read = model_facts(read_checkpoint(own.path, bool(own.sets)))
            for name, value in cell.row.model.items():
                found = getattr(read, name)
                same = (
                    bool(found) == bool(value)
                    if name in ("quantized", "restored", "held_on_gpu", "by_torch", "foreign")
                    else found == value
                )
                if name in ("whole", "blocks"):
                    same = (2 in found) == (2 in value)
                assert same, (str(cell), name, found)


@pytest.mark.parametrize("cell", [cell for cell in ON_CPU if not cell.broken], ids=str)
@pytest.mark.sampled(8)
def test_a_legal_cell_of_a_cpu_starts_and_generates(cell: Cell, saved: Callable[[Cell], Saved], tmp_path: Path) -> None:
    needs_kernels(cell)
    own = saved(cell)
    check_generates(planned(cell, own, here(), tmp_path), own)


@pytest.mark.parametrize("cell", [cell for cell in ON_CPU if cell.broken], ids=str)
@pytest.mark.sampled(6)
def test_an_illegal_cell_of_a_cpu_is_refused_and_fails_where_it_is_forced(
    cell: Cell, saved: Callable[[Cell], Saved], tmp_path: Path
) -> None:
    needs_kernels(cell)
    own = saved(cell)
    with pytest.raises(Refused):
        planned(cell, own, here(), tmp_path)
    if all(rule.chosen for rule in cell.broken):
        assert len(generate(forced(cell, own, device="cpu"))) == len(PROMPTS)  # it could, and is refused by choice
        return
    with pytest.raises((EngineError, ValueError, AssertionError, NotImplementedError)):
        generate(forced(cell, own, device="cpu"))


@pytest.mark.parametrize("cell", ON_GPU, ids=str)
def test_a_cell_of_a_gpu_is_planned_or_refused(cell: Cell, saved: Callable[[Cell], Saved], tmp_path: Path) -> None:
    host = machine(cell.row.capability or cell.column.capability or (9, 0))
    if not cell.broken:
        made = planned(cell, saved(cell), host, tmp_path)
        assert (made.hardware.device, made.hardware.kernels) == ("cuda", cell.situation.written["kernels"])
        return
    with pytest.raises(Refused):
        planned(cell, saved(cell), host, tmp_path)


def in_bf16(cell: Cell) -> bool:
    """Return True if a cell computes in bfloat16. The interpreter skips bfloat16 products: numpy has none, and some
    are infinite (tests/kernels/test_ops.py also requires a GPU). With fp8 pages they are computed in float16."""
    written = cell.situation.written
    return written.get("dtype") == "bfloat16" and written.get("kv_cache") != "fp8"


# Rules about the device itself, which the interpreter does not apply; it computes these cells anyway.
OF_THE_DEVICE = {"bfloat16", "fp8-gpu", "graphs", "ranks-gpus"}


LEGAL = {str(cell): cell for cell in INTERPRETED if not cell.broken and not in_bf16(cell)}
# Other tests in `make test` cover the remaining cells: architectures (engine/layers/test_fused.py), models
# that pool (engine/worker/test_pooled_device.py), encoder-decoder models (test_fused_sources.py beside it), experts
# (test_fused_experts.py), fp8 checkpoints (engine/layers/test_fp8_checkpoints.py) and ranks (engine/test_ranks_gpu.py).
COMPUTED = (
    *("types: Triton, GPU, float32, float32", "types: Triton, GPU, bfloat16, fp8"),
    *("weights: Triton, GPU, weights fp8, fp8", "models: attention sinks, Triton, GPU"),
    *(
        "models: an activation that only torch has, Triton, GPU",
        "switches: `engine.cache.block_tokens: 7`, Triton, GPU",
    ),
    *(
        "models: gptq, awq or compressed-tensors, Triton, GPU",
        "models: GGUF in types that are dequantized, Triton, GPU",
        "weights: Triton, GPU, weights int8, bfloat16",
    ),
)


@pytest.mark.slow
@pytest.mark.skipif(not (installed() and interpreted()), reason="Triton compiles here: the test below runs on the GPU")
@pytest.mark.parametrize("name", thinned(LEGAL, COMPUTED))
def test_a_legal_cell_of_triton_generates_in_the_interpreter(
    name: str, saved: Callable[[Cell], Saved], tmp_path: Path
) -> None:
    cell = LEGAL[name]
    own = saved(cell)
    made = planned(cell, own, machine(cell.row.capability or (9, 0)), tmp_path)
    fields = {"device": "cpu", "kv_measured": False, "graph_sizes": (), "graph_bytes": 0, "threads": 1}
    own_pages = (
        made.quantization.kv_cache
        if made.quantization.kv_cache == "fp8" or "dtype" in cell.situation.written
        else "float32"
    )
    dtype = made.model.dtype if "dtype" in cell.situation.written else "float32"
    check_generates(with_arguments(made, **fields, dtype=dtype, kv_dtype=own_pages), own)


@pytest.mark.skipif(not (installed() and interpreted()), reason="Triton compiles here")
@pytest.mark.parametrize(
    "cell",
    [cell for cell in INTERPRETED if cell.broken and not {rule.name for rule in cell.broken} & OF_THE_DEVICE],
    ids=str,
)
@pytest.mark.sampled(6)
def test_an_illegal_cell_of_triton_fails_where_it_is_forced(cell: Cell, saved: Callable[[Cell], Saved]) -> None:
    if cell.row.label == "heads of 264" or all(rule.chosen for rule in cell.broken):
        pytest.skip("a limit of a GPU's shared memory, or refused by choice")
    own = saved(cell)
    with pytest.raises((EngineError, ValueError, AssertionError, NotImplementedError)):
        generate(forced(cell, own, device="cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cell", [cell for cell in ON_GPU if not cell.broken], ids=str)
def test_a_legal_cell_of_a_gpu_starts_and_generates(cell: Cell, saved: Callable[[Cell], Saved], tmp_path: Path) -> None:
    host, own = read_machine(), saved(cell)
    wanted = cell.row.capability
    if wanted is not None and host.gpus[0].capability < wanted:
        pytest.skip(f"this GPU has compute capability {host.gpus[0].capability}")
    check_generates(planned(cell, own, host, tmp_path), own)
