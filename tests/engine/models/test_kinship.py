"""Messages for unsupported architectures name the kind, and a relative only if there is one."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.api.errors import UnknownArchitecture
from engine.models.checkpoint import read_checkpoint

NONE = "nothing of its kind is"
OTHERS = "none of its family is"


@pytest.mark.parametrize(
    ("name", "more", "kind", "said"),
    [
        ("WhisperForConditionalGeneration", {"is_encoder_decoder": True}, "speech", NONE),
        ("Qwen2AudioForConditionalGeneration", {"audio_config": {}}, "speech", NONE),
        ("Wav2Vec2ForCTC", {}, "speech", NONE),
        ("CLIPModel", {"vision_config": {}}, "images", NONE),
        ("MllamaForConditionalGeneration", {"vision_config": {}, "text_config": {}}, "images", NONE),
        ("ViTForImageClassification", {}, "images", NONE),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "encoder-decoder", OTHERS),
        ("PegasusXForConditionalGeneration", {}, "encoder-decoder", "closest supported is PegasusForConditional"),
        ("MambaForCausalLM", {}, "recurrent states", NONE),
        ("Gemma4ForCausalLM", {}, "decoder of text", "closest supported is Gemma3ForCausalLM"),
        ("GemmaForCausalLM", {}, "decoder of text", "closest supported is Gemma"),
        ("MistralNextForCausalLM", {}, "decoder of text", "closest supported is MistralForCausalLM"),
        ("Qwen5MoeForCausalLM", {"num_experts": 8}, "decoder of text", "closest supported is Qwen3MoeForCausalLM"),
        ("GPT2LMHeadModel", {}, "decoder of text", OTHERS),
        ("DeepseekV3ForCausalLM", {"n_routed_experts": 8}, "decoder of text", OTHERS),
        ("DebertaV2ForSequenceClassification", {}, "encoder of text", OTHERS),
        ("BertForMaskedLM", {}, "encoder of text", "closest supported is Bert"),
    ],
)
def test_kinship_decides_and_not_spelling(
    name: str, more: dict[str, Any], kind: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **more}))
    with pytest.raises(UnknownArchitecture, match=f"'{name}' .*{kind}.* is not supported yet.*{said}") as refused:
        read_checkpoint(tmp_path, weights=False)
    assert "Did you mean" not in str(refused.value)
    if kind in ("speech", "images", "recurrent states"):
        assert "closest" not in str(refused.value)


@pytest.mark.parametrize("name", ["LLamaForCausalLM", "LlamaForCasualLM", "qwen3forcausallm"])
def test_another_spelling_is_corrected(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(UnknownArchitecture, match=r"Did you mean (LlamaForCausalLM|Qwen3ForCausalLM)\? Supported are "):
        read_checkpoint(tmp_path, weights=False)
