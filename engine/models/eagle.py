"""Heads that draft from the hidden states of the model that they were trained for: EAGLE and EAGLE-3.

EAGLE (arXiv:2401.15077) joins the embedding of the next token with the hidden state after the final norm. EAGLE-3
(arXiv:2503.01840) reads the hidden states of three layers, and has a head of its own, often for frequent tokens only.
Format of the checkpoints: SafeAILab/EAGLE, model/cnets1.py and cnets.py; speculators (`Eagle3Speculator`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from engine.api.errors import CheckpointError
from engine.api.files import read_json_object
from engine.models.checkpoint import Checkpoint, check_tensors, read_tensors
from engine.models.config import Config, normalised
from engine.models.headers import TensorInfo
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Embedding,
    FusedStates,
    Head,
    Model,
    PredictionInput,
    ResidualBlock,
    RMSNorm,
    named,
)
from engine.models.quantized import Quantization, read_quantization
from engine.models.rope import rope
from engine.models.sources import join, linear_paths, shared_tensors

EagleMethod = Literal["eagle", "eagle3"]
ARCHITECTURES: dict[EagleMethod, tuple[str, ...]] = {
    "eagle": ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
PLAIN = ("F64", "F32", "F16", "BF16")
UNPACKED = (*PLAIN, "F8_E4M3", "F8_E5M2", "I8")  # a matrix has a column for each input
_UNSUPPORTED = ("norm_before_fc", "fc_norm")  # variants of EAGLE-3 that read other states


def read_eagle(path: str, target: Checkpoint, method: EagleMethod) -> Checkpoint:
    """Read an EAGLE head of a target. Its model has the embedding of the target, and for EAGLE also the head. Raises
    CheckpointError for another architecture, or for a head of another target."""
    folder = Path(path)
    file = folder / "config.json"
    written = read_json_object(file)
    architecture = next(iter(written.get("architectures") or ["none"]))
    if architecture not in ARCHITECTURES[method]:
        raise CheckpointError(
            f"{file}: architectures is {architecture}; supported for speculation.method={method} are "
            f"{', '.join(ARCHITECTURES[method])}"
        )
    problem = _target_problem(target.model) or _unsupported(written)
    if problem:
        raise CheckpointError(f"{file}: {problem}")
    config = normalised({**written, **written.get("transformer_layer_config", {})})
    stored = {name.removeprefix("model."): info for name, info in read_tensors(folder).items()}
    try:
        c = Config.of(config, **_DEFAULTS)
        model = _eagle(c, stored, target) if method == "eagle" else _eagle3(c, stored, target.model)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("config.json", str(file), 1)) from error
    tensors = _named_tensors(stored, target, model)
    quantization = _quantization(config, stored, target, model, tensors, str(file))
    check_tensors(model, tensors, quantization, shared=shared_tensors(model))
    return Checkpoint(
        path=folder,
        architecture=architecture,
        config=config,
        generation={},
        model=model,
        dtype=target.dtype,
        eos_token_ids=(),
        tensors=tensors,
        quantization=quantization,
    )


def kept_layers(path: Path, model: Model) -> tuple[int, ...]:
    """Return the layers of the target whose inputs an EAGLE-3 head reads. Raises CheckpointError.

    `eagle_aux_hidden_state_layer_ids` counts the layers whose outputs are read in `eagle_config` (SGLang), and those
    whose inputs are read elsewhere (vLLM, speculators)."""
    config, count = read_json_object(path / "config.json"), len(model.blocks)
    key = "eagle_aux_hidden_state_layer_ids"
    own = config.get("eagle_config")
    outputs = own.get(key) if isinstance(own, dict) else None
    inputs = config.get(key)
    found = inputs or [one + 1 if isinstance(one, int) else one for one in outputs or []]
    found = found or [2, count // 2, count - 3]
    if not all(isinstance(one, int) and 0 <= one <= count for one in found) or sorted(set(found)) != found:
        raise CheckpointError(
            f"{path / 'config.json'}: {key} selects the inputs of the layers {found}; they must be different, in "
            f"order, and between 0 and the {count} layers of the target"
        )
    return tuple(found)


def _eagle(c: Config, stored: Mapping[str, TensorInfo], target: Checkpoint) -> Model:
    model = target.model
    if c.hidden != model.embed.hidden:
        raise CheckpointError(
            f"config.json: hidden_size is {c.hidden}, and {model.embed.hidden} in the target; the head is of another "
            "model"
        )
    attention, mlp, norm = _parts(c, stored)
    first, *others = (
        (
            ResidualBlock(before=named(norm, "input_layernorm"), body=attention),
            ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
        )
        for _ in range(c.layers)
    )
    return Model(
        embed=_embedding(model),
        blocks=((replace(first[0], before=None), first[1]), *others),
        norm=None,
        head=model.head,
        max_context=model.max_context,
        root=model.root,
        prediction_input=PredictionInput(
            projection="fc", token_norm=None, state_norm=None, bias="fc.bias" in stored, skips_first=False
        ),
        reads_media=model.media is not None,
        shares_embedding=True,
        shares_head=True,
    )


def _eagle3(c: Config, stored: Mapping[str, TensorInfo], target: Model) -> Model:
    has_embedding, hidden = "embed_tokens.weight" in stored, target.embed.hidden
    if c.hidden != hidden and not has_embedding:
        raise CheckpointError(
            f"config.json: hidden_size is {c.hidden}, and {hidden} in the target, whose embedding the head reads; the "
            "head is of another model"
        )
    if c.layers != 1:
        raise CheckpointError(f"config.json: num_hidden_layers is {c.layers}; an EAGLE-3 head has 1")
    if (vocab := c.values.get("vocab_size", target.embed.vocab)) != target.embed.vocab:
        raise CheckpointError(f"config.json: vocab_size is {vocab}, and {target.embed.vocab} in the target")
    attention, mlp, norm = _parts(c, stored)
    fc = stored.get("fc.weight")
    layers = 3 if fc is None or fc.dtype not in UNPACKED else fc.shape[-1] // hidden
    rows = c.whole_or_none("draft_vocab_size") or target.embed.vocab
    if rows != target.embed.vocab and "d2t" not in stored:
        raise CheckpointError(f"config.json: draft_vocab_size is {rows}, but the checkpoint has no tensor d2t")
    block: Block = (
        ResidualBlock(body=replace(attention, hidden=2 * c.hidden, outputs=c.hidden), side="pair"),
        ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
    )
    return Model(
        embed=Embedding(vocab=target.embed.vocab, hidden=c.hidden) if has_embedding else _embedding(target),
        blocks=(block,),
        norm=named(norm, "norm"),
        head=Head(tied=False, rows=rows, ids="d2t" if "d2t" in stored else "", name="draft_lm_head"),
        max_context=target.max_context,
        root=DRAFT_ROOT if has_embedding else target.root,
        prediction_input=FusedStates(
            projection="fc",
            layers=layers,
            hidden=hidden,
            bias="fc.bias" in stored,
            token_norm=named(norm, "input_layernorm"),
            state_norm=named(norm, "hidden_norm"),
            norm_before_residual=c.flag("norm_before_residual"),
        ),
        kept_layers=(1,),
        unread=("t2d",),
        reads_media=target.media is not None and not has_embedding,
        shares_embedding=not has_embedding,
    )


DRAFT_ROOT = "model"


def _parts(c: Config, stored: Mapping[str, TensorInfo]) -> tuple[Attention, MLP, RMSNorm]:
    first = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"

    def has(name: str) -> bool:
        return f"{first}.{name}.bias" in stored

    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=rope(c),
        bias=(has("self_attn.q_proj"), has("self_attn.o_proj")),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=has("mlp.up_proj"))
    return attention, mlp, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))


def _embedding(target: Model) -> Embedding:
    """Return the embedding of the target's tokens, as a head reads it."""
    return Embedding(vocab=target.embed.vocab, hidden=target.embed.hidden, name=target.embed.name)


def _named_tensors(stored: Mapping[str, TensorInfo], target: Checkpoint, model: Model) -> dict[str, TensorInfo]:
    """Return the tensors of a head by their names in its model, and the shared tensors of the target."""
    layer = join(model.root, "layers.0")
    names = {"midlayer.": f"{layer}.", "fc.": f"{layer}.fc.", "layers.": join(model.root, "layers."),
             "norm.": join(model.root, "norm.")}  # fmt: skip
    found = {}
    for name, info in stored.items():
        before = next((one for one in names if name.startswith(one)), "")
        if before:
            found[names[before] + name.removeprefix(before)] = info
        elif name.startswith("lm_head."):
            if not model.shares_head:
                found["draft_" + name] = info
        elif name.startswith("embed_tokens."):  # an EAGLE head may have a copy of the target's
            if not model.shares_embedding:
                found[join(model.root, name)] = info
        else:
            found[name] = info
    shared = tuple(f"{path}." for path in _shared_paths(model))
    return found | {name: info for name, info in target.tensors.items() if name.startswith(shared)}


def _shared_paths(model: Model) -> tuple[str, ...]:
    return tuple(name.rpartition(".")[0] for name in sorted(shared_tensors(model)))


def _quantization(
    config: Mapping[str, Any],
    stored: Mapping[str, TensorInfo],
    target: Checkpoint,
    model: Model,
    tensors: Mapping[str, TensorInfo],
    file: str,
) -> Quantization | None:
    """Return the formats of the head's own projections, and of the tensors that it shares with a quantized target."""
    shared = set(_shared_paths(model))
    layer = join(model.root, "layers.")
    first = "midlayer." if any(name.startswith("midlayer.") for name in stored) else "layers.0."
    names = {
        path: path.replace(f"{layer}0.fc", "fc").replace(f"{layer}0.", first).replace(layer, "layers.")
        for path in linear_paths(model)
    } | {"draft_lm_head": "lm_head"}
    own = read_quantization(config, model, file, names)
    # Exporters leave out the projection of the states without naming it.
    plain = {name.removesuffix(".weight") for name, info in tensors.items() if info.dtype in PLAIN}
    found = {} if own is None else {path: one for path, one in own.formats.items() if path not in shared | plain}
    theirs = {} if target.quantization is None else target.quantization.formats
    formats = found | {path: one for path, one in theirs.items() if path in shared}
    known = own if found else target.quantization
    return None if known is None else replace(known, formats=formats).named(tensors)


def _unsupported(config: Mapping[str, Any]) -> str:
    """Return a property that no executor supports, or an empty string."""
    return next((f"{key} is not supported; use another head" for key in _UNSUPPORTED if config.get(key)), "")


def _target_problem(model: Model) -> str:
    """Return why a model can have no EAGLE head, or an empty string."""
    if model.foreign is not None or model.encoder is not None or model.pooler is not None or model.head is None:
        return "the target must be a decoder that generates text, and that transformers does not compute"
    if model.streams is not None or model.embed.width is not None:
        return "the target has no single hidden state of the size of its embedding, which EAGLE heads read"
    return ""
