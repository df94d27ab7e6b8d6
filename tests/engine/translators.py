"""Tiny random encoder-decoder models, saved by transformers, and their expected results."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

VOCAB, LONGEST = 97, 40
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 66,
    "decoder_ffn_dim": 50,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}

# The heads of a T5 model need not be as wide together as the model.
T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 50,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "n_positions": LONGEST,
}
ODD_BUCKETS = {"relative_attention_num_buckets": 7, "relative_attention_max_distance": 11}

# name -> prefix of its transformers classes, settings in addition to SIZES
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", {}),
    "bart-forced": ("Bart", {"forced_bos_token_id": 5, "scale_embedding": True}),
    "mbart": ("MBart", {"scale_embedding": True, "activation_function": "relu"}),
    "pegasus": ("Pegasus", {"scale_embedding": True}),
    "marian": ("Marian", {"activation_function": "swish"}),
    # Its positions skip padding tokens. No client sends them, but a random model may generate them.
    "m2m100": ("M2M100", {"pad_token_id": 0}),
    # Distances up to 39 exceed the largest distance of some models, but not the default.
    "t5": ("T5", {}),
    "flan-t5": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_heads": 2, **ODD_BUCKETS}),
    "mt5": ("MT5", {"feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5", {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 30}),
}
T5_KINDS = ("T5", "MT5", "UMT5")


@dataclass
class Translator:
    path: Path
    model: Any

    @property
    def begins(self) -> tuple[int, ...]:
        forced = self.model.generation_config.forced_bos_token_id
        return (self.model.config.decoder_start_token_id, *([] if forced is None else [forced]))

    @torch.no_grad()
    def logits(self, source: list[int], reply: list[int]) -> Tensor:
        """[len(reply), vocab]: of the token behind each of the reply, which begins as all do."""
        return self.model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([reply])).logits[0].float()


def write(folder: Path, name: str, **more: Any) -> Translator:
    kind, own = CASES[name]
    if kind in T5_KINDS:
        return write_t5(folder / name, kind, **{**own, **more})
    own = {**SIZES, **own, **more}
    forced = own.pop("forced_bos_token_id", None)
    config = getattr(transformers, f"{kind}Config")(**own)
    model_class = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
    torch.manual_seed(len(name))
    model = getattr(transformers, model_class)(config).eval()
    computed = [
        id(one.weight) for one in model.modules() if "Sinusoidal" in type(one).__name__ and hasattr(one, "weight")
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in computed:
                parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter if parameter.ndim == 1 else 0))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    model.generation_config.forced_bos_token_id = forced
    model.save_pretrained(folder / name)
    return Translator(folder / name, model)


def write_t5(folder: Path, kind: str, **own: Any) -> Translator:
    """Save a T5 model. Without `tie_word_embeddings`, its head is a separate matrix, and config.json has the form of
    the published checkpoints; transformers 5 writes another one."""
    config = getattr(transformers, f"{kind}Config")(**{**T5_SIZES, **own})
    torch.manual_seed(len(str(own)))
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    separate = own.get("tie_word_embeddings") is False
    with torch.no_grad():
        if separate:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        for name, parameter in model.named_parameters():
            large = "shared" in name or "relative" in name or "lm_head" in name
            scale = 1.0 if large else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.ndim == 1 else 0))
    model.save_pretrained(folder)
    if separate:
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        kept = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        written = json.loads((folder / "config.json").read_text())
        del written["scale_decoder_outputs"]
        (folder / "config.json").write_text(json.dumps(written | {"tie_word_embeddings": False}))
    return Translator(folder, model)
