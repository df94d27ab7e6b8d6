"""Tiny random encoder-decoder models, saved by transformers, and their expected results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
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

# name -> prefix of its transformers classes, settings in addition to SIZES
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", {}),
    "bart-forced": ("Bart", {"forced_bos_token_id": 5, "scale_embedding": True}),
    "mbart": ("MBart", {"scale_embedding": True, "activation_function": "relu"}),
    "pegasus": ("Pegasus", {"scale_embedding": True}),
    "marian": ("Marian", {"activation_function": "swish"}),
    # Its positions skip padding tokens. No client sends them, but a random model may generate them.
    "m2m100": ("M2M100", {"pad_token_id": 0}),
}


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
