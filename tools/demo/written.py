"""The model's folder in Hugging Face layout."""

import json
from itertools import islice
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tools.demo.network import Network, Shape
from tools.demo.template import CHAT_TEMPLATE, prompt
from tools.demo.tokenizer import END, PAD, train_tokenizer
from tools.demo_corpus import training_samples

TOKENIZER_SAMPLES = 8000
WORD_SKILLS = frozenset({"repeat", "reverse list", "reverse word", "spell"})  # their words shall stay in pieces


def _write(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, seed: int) -> None:
    """Trains the tokenizer on the corpus and writes its two files."""
    samples = islice(training_samples(seed), TOKENIZER_SAMPLES)
    tokenizer = train_tokenizer(prompt(sample) + sample.target for sample in samples if sample.skill not in WORD_SKILLS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "bos_token": None, "eos_token": END,
        "pad_token": PAD, "unk_token": None, "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    _write(folder / "tokenizer_config.json", settings)


def write_weights(folder: Path, network: Network, weights: dict[str, Tensor], end: int, pad: int) -> None:
    """Config, generation defaults and the given weights (by the network's own names)."""
    shape: Shape = network.shape
    _write(folder / "config.json", shape.config(end, pad))
    _write(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.1, "eos_token_id": [end, pad], "pad_token_id": pad},
    )
    partial = folder / "model.partial"
    save_file(network.checkpoint(weights), partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
