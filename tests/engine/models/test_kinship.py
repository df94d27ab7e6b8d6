"""Messages for unsupported architectures name the kind, and a relative only if there is one."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.api.errors import UnknownArchitecture
from engine.models import foreign
from engine.models.checkpoint import read_checkpoint
from engine.models.unsupported import NOT_SERVED

OTHERS = "nor is its family"


@pytest.mark.parametrize(
    ("name", "more", "kind", "said"),
    [
        ("Speech2TextForConditionalGeneration", {"is_encoder_decoder": True}, "audio", OTHERS),
        ("GraniteSpeechForConditionalGeneration", {"audio_config": {}}, "audio", OTHERS),
        ("Wav2Vec2ForCTC", {}, "audio", OTHERS),
        ("AltCLIPModel", {"vision_config": {}}, "vision", OTHERS),
        ("MllamaForConditionalGeneration", {"vision_config": {}, "text_config": {}}, "vision", OTHERS),
        ("ViTForImageClassification", {}, "vision", OTHERS),
        ("LongT5ForConditionalGeneration", {"is_encoder_decoder": True}, "encoder-decoder", OTHERS),
        ("ProphetNetForConditionalGeneration", {"is_encoder_decoder": True}, "encoder-decoder", OTHERS),
        ("PegasusXForConditionalGeneration", {}, "encoder-decoder", "closest supported is PegasusForConditional"),
        ("Mamba3ForCausalLM", {}, "recurrent states", "closest supported is Mamba2ForCausalLM"),
        ("RwkvForCausalLM", {}, "recurrent states", OTHERS),
        ("Gemma5ForCausalLM", {}, "text decoder", "closest supported is Gemma"),
        ("MistralNextForCausalLM", {}, "text decoder", "closest supported is MistralForCausalLM"),
        ("Qwen5MoeForCausalLM", {"num_experts": 8}, "text decoder", "closest supported is Qwen3MoeForCausalLM"),
        ("XGLMForCausalLM", {}, "text decoder", OTHERS),
        ("GPTNeoForCausalLM", {}, "text decoder", "closest supported is GPTNeoXForCausalLM"),
        ("DeepseekV4ForCausalLM", {"n_routed_experts": 8}, "text decoder", "closest supported is DeepseekV"),
        ("DbrxForCausalLM", {"n_routed_experts": 8}, "text decoder", OTHERS),
        ("DebertaV2ForSequenceClassification", {}, "text encoder", OTHERS),
        ("BertForMaskedLM", {}, "text encoder", "closest supported is Bert"),
    ],
)
def test_closest_architecture_follows_the_family(
    name: str, more: dict[str, Any], kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "_decoders", lambda: {})  # as without transformers, whose decoders are served
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **more}))
    with pytest.raises(UnknownArchitecture, match=f"'{name}' .*{kind}.* is not supported yet.*{said}") as refused:
        read_checkpoint(tmp_path, weights=False)
    assert "Did you mean" not in str(refused.value)
    if kind in ("audio", "vision"):
        assert "closest" not in str(refused.value)


def test_an_architecture_of_another_kind_has_no_relatives(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["TransformerNetwork"]}))
    with pytest.raises(UnknownArchitecture, match="'TransformerNetwork' is not supported yet, nor is any model of its"):
        read_checkpoint(tmp_path, weights=False)


@pytest.mark.parametrize("name", ["LLamaForCausalLM", "LlamaForCasualLM", "qwen3forcausallm"])
def test_misspelled_architecture_is_corrected(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(UnknownArchitecture, match=r"Did you mean (LlamaForCausalLM|Qwen3ForCausalLM)\? Supported are "):
        read_checkpoint(tmp_path, weights=False)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_models_with_images_that_are_not_served_are_refused_with_an_alternative(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    reason, instead = NOT_SERVED[name]
    with pytest.raises(UnknownArchitecture) as refused:
        read_checkpoint(tmp_path, weights=False)
    assert str(refused.value).endswith(f"the architecture {name!r} is not supported: {reason}; {instead}")


def test_the_text_decoder_of_a_model_that_is_not_served_is_named(tmp_path: Path) -> None:
    config = {"architectures": ["InstructBlipForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnknownArchitecture, match="depend on the text of the prompt; .*text_only: true serves its text"
    ):
        read_checkpoint(tmp_path, weights=False)
