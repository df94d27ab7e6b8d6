"""Tiny encoder-decoder models, each with a tokenizer, and the results of transformers' greedy search."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.engine.translators import write

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
LANGUAGES = ("eng_Latn", "fra_Latn")
CORPUS = ["the quick brown fox jumps over the lazy dog, and the dog says: hello world, what is 17 + 25?"] * 9
SIZES = {  # heads of 8, which all kernels serve
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_decoder_layers": 2, "num_heads": 4, "n_positions": 64}
EXTRA_IDS = 5
KINDS = ("bart", "mbart", "pegasus", "marian", "m2m100", "flan-t5")


def write_tokenizer(folder: Path) -> Tokenizer:
    """Pieces of plain letters, `<s> text </s>`, and the names of two languages as special tokens."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=list(SPECIALS)))
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in LANGUAGES])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def write_t5_tokenizer(folder: Path) -> Tokenizer:
    """A Unigram model as T5's: `text </s>`, and sentinels `<extra_id_N>` whose ids descend to the end."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    specials = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=specials, unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in sentinels()[::-1]])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "T5Tokenizer",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "extra_ids": EXTRA_IDS,
        "additional_special_tokens": sentinels(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def sentinels() -> list[str]:
    return [f"<extra_id_{number}>" for number in range(EXTRA_IDS)]


@dataclass
class Sourced:
    """A checkpoint folder, its tokenizer and its model."""

    path: Path
    tokenizer: Tokenizer
    model: Any
    known: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def greedy(self, prompt: str | list[int], tokens: int, begins: Sequence[int] = ()) -> list[int]:
        """Return the tokens that transformers generates after its own decoder prompt or after `begins`."""
        options: dict[str, Any] = {"max_new_tokens": tokens + 1}
        if begins:
            options = {
                "max_new_tokens": tokens,
                "decoder_input_ids": torch.tensor([begins]),
                "forced_bos_token_id": None,
            }
        ids = self.ids(prompt) if isinstance(prompt, str) else prompt
        if (key := (tuple(ids), tokens, tuple(begins))) in self.known:
            return self.known[key]
        with torch.no_grad():
            found = self.model.generate(torch.tensor([ids]), num_beams=1, do_sample=False, **options)
        self.known[key] = found[0, -tokens:].tolist()
        return self.known[key]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def save(folder: Path, kind: str = "bart", **more: Any) -> Sourced:
    """Below the folder. Replies begin with `</s>` and, forced, `<s>`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / kind).mkdir()
    if kind == "flan-t5":
        return _save_t5(folder, **more)
    tokenizer = write_tokenizer(folder / kind)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "forced_bos_token_id": 0, **SIZES, **more}
    made = write(folder, kind, **sizes)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            # Small embeddings and biases with large matrices; otherwise one token is the most likely everywhere.
            plain = parameter.ndim == 1
            scale = 0.05 if plain else 0.25 if "shared" in name else 0.7
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * scale + (plain and name.endswith("weight")))
        if hasattr(made.model, "final_logits_bias"):
            made.model.final_logits_bias.mul_(0.1)
    made.model.save_pretrained(made.path)
    # Disable end tokens, sampled or forced at the maximum length: they would shorten the compared replies.
    made.model.generation_config.eos_token_id = None
    made.model.generation_config.forced_eos_token_id = None
    return Sourced(made.path, tokenizer, made.model)


def _save_t5(folder: Path, **more: Any) -> Sourced:
    tokenizer = write_t5_tokenizer(folder / "flan-t5")
    made = write(folder, "flan-t5", vocab_size=tokenizer.get_vocab_size(), **T5_SIZES, **more)
    made.model.generation_config.eos_token_id = None
    return Sourced(made.path, tokenizer, made.model)
