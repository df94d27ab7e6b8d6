"""Tiny random checkpoints of models that pool, saved by transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from engine.core.plan import StepResult

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 66,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA = {**GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 24, "layer_types": KINDS}
T5 = {"d_model": 48, "d_ff": 66, "d_kv": 10, "num_layers": 3, "num_heads": 6, "relative_attention_num_buckets": 8}
LOCAL = {"local_attention": 6, "layer_types": [KINDS[2], KINDS[0], KINDS[0]]}
THREE = {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
ONE = {"id2label": {0: "relevant"}, "label2id": {"relevant": 0}}

# name -> class of transformers, settings in addition to SIZES
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-odd": ("BertModel", {"hidden_size": 40, "num_attention_heads": 5, "hidden_act": "gelu_new"}),
    "bert-classifier": ("BertForSequenceClassification", THREE),
    "bert-score": ("BertForSequenceClassification", ONE),
    "bert-tokens": ("BertForTokenClassification", THREE),
    "roberta": ("RobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "roberta-classifier": ("RobertaForSequenceClassification", {**THREE, "pad_token_id": 1}),
    "roberta-tokens": ("RobertaForTokenClassification", {**THREE, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta-score": ("XLMRobertaForSequenceClassification", {**ONE, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta-tokens": ("XLMRobertaForTokenClassification", {**THREE, "pad_token_id": 1}),
    "modernbert": ("ModernBertModel", LOCAL),
    "modernbert-biases": ("ModernBertModel", {**LOCAL, "attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    "modernbert-classifier": ("ModernBertForSequenceClassification", {**LOCAL, **THREE}),
    "modernbert-mean": ("ModernBertForSequenceClassification", {**LOCAL, **ONE, "classifier_pooling": "mean",
                                                                "classifier_bias": True, "norm_bias": True}),
    "modernbert-tokens": ("ModernBertForTokenClassification", {**LOCAL, **THREE}),
    "gte": ("GteModel", {}),
    "gte-odd": ("GteModel", {"hidden_size": 40, "num_attention_heads": 5, "type_vocab_size": 0}),
    "gte-named-new": ("NewModel", {"type_vocab_size": 0}),
    "gte-score": ("GteForSequenceClassification", ONE),
    "gte-tokens": ("GteForTokenClassification", THREE),
    "gte-classifier": ("NewForSequenceClassification", THREE),
    "gte-tokens-named-new": ("NewForTokenClassification", THREE),
    "jina-v2": ("JinaBertModel", {"num_attention_heads": 4}),
    "jina-v2-odd": ("JinaBertModel", {"hidden_size": 40, "num_attention_heads": 5}),
    "jina-v2-masked": ("JinaBertForMaskedLM", {}),
    "jina-v3": ("JinaEmbeddingsV3Model", {}),
    "jina-v3-odd": ("JinaEmbeddingsV3Model", {"hidden_size": 40, "num_attention_heads": 5, "hidden_act": "gelu_new"}),
    "jina-v3-classifier": ("JinaEmbeddingsV3ForSequenceClassification", THREE),
    "jina-v3-tokens": ("JinaEmbeddingsV3ForTokenClassification", THREE),
    "nomic": ("NomicBertModel", {}),
    "nomic-classifier": ("NomicBertForSequenceClassification", THREE),
    "nomic-tokens": ("NomicBertForTokenClassification", THREE),
    "eurobert": ("EuroBertModel", {"num_key_value_heads": 2}),
    "eurobert-masked": ("EuroBertForMaskedLM", {"attention_bias": True, "mlp_bias": True}),
    "eurobert-classifier": ("EuroBertForSequenceClassification", {**THREE, "classifier_pooling": "bos"}),
    "eurobert-mean": ("EuroBertForSequenceClassification", {**ONE, "classifier_pooling": "mean"}),
    "eurobert-tokens": ("EuroBertForTokenClassification", THREE),
    "t5-encoder": ("T5EncoderModel", T5),
    "mt5-encoder": ("MT5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu"}),
    "umt5-encoder": ("UMT5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu"}),
    "gemma3-both-ways": ("Gemma3TextModel", {**GEMMA, "use_bidirectional_attention": True}),
    "gemma-embedding": (
        "Gemma3TextModel", {**GEMMA, "query_pre_attn_scalar": 16, "use_bidirectional_attention": True}),
    "gemma3": ("Gemma3TextModel", GEMMA),
    "gemma3-classifier": ("Gemma3TextForSequenceClassification", {**GEMMA, **THREE}),
    "gemma2": ("Gemma2Model", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma2-classifier": ("Gemma2ForSequenceClassification", {**GEMMA, **THREE}),
    "qwen3": ("Qwen3Model", GROUPED),
    "qwen3-score": ("Qwen3ForSequenceClassification", {**GROUPED, **ONE}),
    "qwen2": ("Qwen2Model", {"num_key_value_heads": 2}),
    "qwen2-classifier": ("Qwen2ForSequenceClassification", {"num_key_value_heads": 2, **THREE}),
    "llama": ("LlamaModel", {"num_key_value_heads": 2}),
    "llama-classifier": ("LlamaForSequenceClassification", {"num_key_value_heads": 2, **THREE}),
    "mistral": ("MistralModel", {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral-classifier": ("MistralForSequenceClassification", {"num_key_value_heads": 2, **THREE}),
}  # fmt: skip


def is_encoder(kind: str) -> bool:
    return "ert" in kind or kind.startswith(("Gte", "New", "Jina")) or kind.endswith("EncoderModel")


# Together they have every part of all cases (test_features.py).
EACH_PART = ("jina-v2", "gte", "xlm-roberta-score", "modernbert-tokens", "gemma3", "gemma2", "qwen2", "t5-encoder")
WHOLE = [name for name, (kind, more) in CASES.items() if is_encoder(kind) or "use_bidirectional_attention" in more]


class _GatedMlp(torch.nn.Module):
    """MLP of JinaBERT, with its residual and norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gated_layers = torch.nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = torch.nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = torch.nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gated_layers(x).chunk(2, -1)
        return self.layernorm(self.wo(torch.nn.functional.gelu(gate) * up) + x)


class _NoPositions(torch.nn.Module):
    def forward(self, positions: torch.Tensor) -> int:
        return 0


class JinaBert(transformers.BertModel):  # type: ignore[misc]
    """JinaBERT, whose code is not part of transformers: a BERT with ALiBi in both directions and gated MLPs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.embeddings.position_embeddings = _NoPositions()
        for layer in self.encoder.layer:
            del layer.intermediate, layer.output
            layer.mlp = _GatedMlp(config)
            layer.feed_forward_chunk = layer.mlp.forward

    def forward(self, input_ids: torch.Tensor) -> Any:
        positions, heads = torch.arange(input_ids.shape[1]), self.config.num_attention_heads
        slopes = _get_alibi_slopes(heads, torch.device("cpu")).view(1, heads, 1, 1)
        return super().forward(input_ids, attention_mask=-slopes * (positions - positions.unsqueeze(1)).abs())


REFERENCES: dict[str, Any] = {
    "JinaBertModel": JinaBert,
    "JinaBertForMaskedLM": JinaBert,
    "EuroBertForMaskedLM": transformers.EuroBertModel,
    "NewModel": transformers.GteModel,
    "NewForSequenceClassification": transformers.GteForSequenceClassification,
    "NewForTokenClassification": transformers.GteForTokenClassification,
}
"""Classes that compute architectures whose code is not part of transformers."""


def reference(kind: str) -> Any:
    return REFERENCES.get(kind) or getattr(transformers, kind)


def own_settings(kind: str) -> dict[str, str]:
    """Return settings of an architecture that its reference class does not have."""
    return {"position_embedding_type": "alibi", "feed_forward_type": "geglu"} if kind.startswith("JinaBert") else {}


def _rename(kind: str, path: Path) -> None:
    """Write the names of the original checkpoints of an architecture."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **own_settings(kind), "architectures": [kind]}))
    file = path / "model.safetensors"
    tensors = {re.sub("^gte[.]", "new.", name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def save(name: str, path: Path) -> Path:
    """The checkpoint of a case."""
    kind, more = CASES[name]
    classed = reference(kind)
    torch.manual_seed(len(name))
    model = classed(classed.config_class(**{**SIZES, **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter if parameter.ndim == 1 else 0))
    model.save_pretrained(path)
    if kind in REFERENCES:
        _rename(kind, path)
    return path


def values(result: StepResult, row: int) -> torch.Tensor:
    """Return the pooled output of a row of a step."""
    pooled = result.pooled[row]
    return torch.from_numpy(np.frombuffer(pooled.values, "<f4").reshape(pooled.shape).copy())
