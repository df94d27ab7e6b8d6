"""Tiny random Whisper models, saved by transformers, with tokenizers made for the tests."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.media.spectrogram import HOP, SAMPLE_RATE, log_mel

LANGUAGES = ("en", "fr", "zh")
CORPUS = ["hello world, the quick brown fox jumps over the lazy dog. what is 17 + 25?"] * 9
WINDOW_S = 2.0  # duration of a window of tiny models
SIZES: dict[str, Any] = {
    "num_mel_bins": 80,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_source_positions": int(WINDOW_S * SAMPLE_RATE) // HOP // 2,
    "max_target_positions": 48,
}


@dataclass
class Whisper:
    path: Path
    tokenizer: Tokenizer
    model: Any

    def id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    def begins(self, language: str = "en", task: str = "transcribe", *, timestamps: bool = False) -> tuple[int, ...]:
        names = ["<|startoftranscript|>", f"<|{language}|>", f"<|{task}|>"]
        return tuple(map(self.id, names if timestamps else [*names, "<|notimestamps|>"]))

    @torch.no_grad()
    def logits(self, spectrogram: np.ndarray, reply: list[int]) -> torch.Tensor:
        """[len(reply), vocab]: of the token after each of the reply, which begins as all do."""
        features = torch.from_numpy(spectrogram)[None]
        return self.model(input_features=features, decoder_input_ids=torch.tensor([reply])).logits[0].float()


def write_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level pieces, and Whisper's special tokens in its order, with timestamps of 0.02 s."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    names = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{one}|>" for one in LANGUAGES), "<|translate|>"]
    names += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    times = [f"<|{0.02 * number:.2f}|>" for number in range(int(WINDOW_S * 50) + 1)]
    backend.add_tokens([AddedToken(name, normalized=False, special=False) for name in times])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "WhisperTokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def write(folder: Path, *, alignment_heads: Any = None, sure: float = 1.0, **more: Any) -> Whisper:
    """Save a model. `sure` multiplies its logits: from 3 on, greedy transcripts do not fall back to sampling."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder)
    ids = {name: tokenizer.token_to_id(name) for name in tokenizer.get_vocab()}
    end = ids["<|endoftext|>"]
    sizes = {**SIZES, "vocab_size": tokenizer.get_vocab_size(), "pad_token_id": end, "bos_token_id": end, **more}
    start = ids["<|startoftranscript|>"]
    config = transformers.WhisperConfig(**sizes, eos_token_id=end, decoder_start_token_id=start)
    torch.manual_seed(3)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = parameter.ndim == 1
            scale = 0.1 if plain else 0.3 if "embed" in name else 0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (plain and name.endswith("norm.weight")))
        model.model.decoder.layer_norm.weight.mul_(sure)
        model.model.decoder.layer_norm.bias.mul_(sure)
    generation = model.generation_config
    generation.lang_to_id = {f"<|{one}|>": ids[f"<|{one}|>"] for one in LANGUAGES}
    generation.task_to_id = {one: ids[f"<|{one}|>"] for one in ("transcribe", "translate")}
    generation.no_timestamps_token_id = ids["<|notimestamps|>"]
    generation.is_multilingual = True
    generation.max_initial_timestamp_index = 20
    generation.suppress_tokens = [ids["<|startoflm|>"], ids["<|startofprev|>"], ids["<|nospeech|>"], start]
    generation.begin_suppress_tokens = [tokenizer.encode(" ").ids[0], end]
    generation.prev_sot_token_id = ids["<|startofprev|>"]
    generation.max_length = sizes["max_target_positions"]
    generation.decoder_start_token_id = start
    generation.eos_token_id = end
    generation.forced_decoder_ids = None
    if alignment_heads is not None:
        generation.alignment_heads = alignment_heads
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": sizes["num_mel_bins"]})
    )
    return Whisper(folder, tokenizer, model)


def spectrogram(seed: int, mels: int = 80) -> np.ndarray:
    """Return the spectrogram of a window of noise and tones."""
    rng = np.random.default_rng(seed)
    count = int(WINDOW_S * SAMPLE_RATE)
    samples = rng.normal(size=count) * 0.1 + np.sin(np.arange(count) * rng.uniform(0.02, 0.5))
    return log_mel(samples.astype(np.float32), mels=mels, frames=count // HOP)
