"""Messages for unsupported architectures: the kind of model, and the closest supported architecture of that kind.

Architectures are related if they have the same kind (decoder, encoder-decoder, encoder, vision, speech, recurrent) and
family (the name up to the first digit). Similar names alone mean nothing: Whisper is not a kind of BART.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.models.text_only import KEY, text_architecture

_SPEECH = (
    r"whisper|speech|wav2vec|hubert|wavlm|audio|voxtral|seamless|bark|musicgen|encodec|moonshine|parakeet|canary|csm"
)
_VISION = (
    r"clip|siglip|vit(?![a-z])|vision|image|visual|llava|blip|swin|detr|dino|(?<![a-z])sam|florence|pix2struct|kosmos|"
    r"internvl|fuyu|donut|trocr|paligemma|idefics|smolvlm|mllama|chameleon|(?<=[a-z0-9_])vl|omni|convnext|segformer"
)
_RECURRENT = r"mamba|rwkv|jamba|zamba|bamba|recurrent|griffin|xlstm|lfm|hyena|retnet|qwen3next|plamo2|nemotronh|titan"
_SEVERAL = r"moe|mixtral|experts|deepseekv|gptoss|dbrx|grok|arctic"
KINDS = {
    "speech": "an audio model",
    "vision": "a vision model",
    "recurrent": "a decoder with recurrent states",
    "encoder-decoder": "a text encoder-decoder",
    "decoder": "a text decoder",
    "encoder": "a text encoder",
}


_INSTRUCT = "its embeddings of an image depend on the text of the prompt", "serve BLIP-2 or LLaVA instead"
_MINICPM = "its tower has code of its own outside transformers", "serve MiniCPM-V 4.6 instead"
_OCR = "its image encoder is SAM with a decoder of queries", "serve GLM-OCR, LightOnOCR or MiniCPM-OCR instead"
_RADIO = (
    "RADIO is not supported as an image encoder",
    "serve SigLIP 2 for vectors, or InternVL3 or Qwen3-VL to read images",
)
_MOLMO = "its images attend to one another in both directions", "serve Qwen3-VL or InternVL3 instead"
NOT_SERVED: dict[str, tuple[str, str]] = {
    "DeepseekOCR2ForCausalLM": _OCR,
    "DeepseekOCRForCausalLM": _OCR,
    "DeepseekOcr2ForConditionalGeneration": _OCR,
    "InstructBlipForConditionalGeneration": _INSTRUCT,
    "InstructBlipVideoForConditionalGeneration": _INSTRUCT,
    "MiniCPMO": _MINICPM,
    "MiniCPMV": _MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": (
        "its positions follow the canvas of an image",
        "serve MiniCPM-V 4.6 instead",
    ),
    "Molmo2ForConditionalGeneration": _MOLMO,
    "NemotronH_Nano_VL_V2": _RADIO,
    "NemotronH_Omni_Reasoning_V3": _RADIO,
    "Phi4MMForCausalLM": (
        "its layout has adapters inside the weights",
        "convert it to Phi4MultimodalForCausalLM with transformers, and declare the adapters",
    ),
    "RADIOModel": _RADIO,
    "RadioModel": _RADIO,
}
"""Why architectures that read images are not served, and what to serve instead."""


def kind_of(architecture: str, config: Mapping[str, Any]) -> str:
    """Return one of KINDS, or "" for any other architecture."""
    name = re.sub("ForConditionalGeneration$", "", architecture).lower()
    nested = {key for key in ("vision_config", "audio_config") if isinstance(config.get(key), dict)}
    if re.search(_SPEECH, name) or "audio_config" in nested and "vision_config" not in nested:
        return "speech"
    if re.search(_VISION, name) or "vision_config" in nested:
        return "vision"
    if re.search(_RECURRENT, name):
        return "recurrent"
    if config.get("is_encoder_decoder") is True or re.search(r"For(ConditionalGeneration|Seq2SeqLM)$", architecture):
        return "encoder-decoder"
    if re.search(r"ForCausalLM|LMHeadModel|LMHead$", architecture):
        return "decoder"
    return "encoder" if re.search(r"Model$|For(MaskedLM|\w*Classification|QuestionAnswering)$", architecture) else ""


def closest(architecture: str, config: Mapping[str, Any], supported: Mapping[str, Sequence[str]]) -> str:
    """Return the supported architecture of the same kind and family, or "". Of names that differ in the version alone,
    it is the one with the closest version. `supported`: names by kind."""
    kind, family = kind_of(architecture, config), _family(architecture)
    relatives = [name for name in supported.get(kind, ()) if _family(name) == family]
    several = _has_experts(architecture, config)
    same = [name for name in relatives if _has_experts(name, {}) == several]
    return max(same, key=lambda name: _resemblance(name, architecture), default="")


def _resemblance(name: str, other: str) -> tuple[float, int]:
    bare, version = zip(*((re.sub(r"\d", "", one), re.search(r"\d+", one)) for one in (name, other)), strict=True)
    numbers = [1 if found is None else int(found[0]) for found in version]
    return difflib.SequenceMatcher(None, *bare).ratio(), -abs(numbers[0] - numbers[1])


def misspelt(architecture: str, names: Sequence[str]) -> str:
    """Return the supported name that this one misspells, or ""."""
    for name in names:
        if name.casefold() == architecture.casefold():
            return name
        same = re.findall("[A-Z0-9]", name) == re.findall("[A-Z0-9]", architecture)
        if same and difflib.SequenceMatcher(None, name, architecture).ratio() > 0.9:
            return name
    return ""


def unsupported(architecture: str, config: Mapping[str, Any], supported: Mapping[str, Sequence[str]]) -> str:
    """Return the message for an architecture that is not supported."""
    every = sorted(name for names in supported.values() for name in names)
    said = f"config.json: the architecture {architecture!r}"
    if architecture in NOT_SERVED:
        reason, instead = NOT_SERVED[architecture]
        text = text_architecture(config)
        alone = f"; {KEY}: true serves its text decoder as {text}" if text else ""
        return f"{said} is not supported: {reason}; {instead}{alone}"
    if text := text_architecture(config):
        return f"{said} is multimodal, and only its text decoder is supported: set {KEY}: true to serve it as {text}"
    if name := misspelt(architecture, every):
        return f"{said} is not supported. Did you mean {name}? Supported are {', '.join(every)}"
    kind = kind_of(architecture, config)
    said += f" ({KINDS[kind]})" if kind else ""
    if name := closest(architecture, config, supported):
        return f"{said} is not supported yet; the closest supported is {name}. Supported are {', '.join(every)}"
    alike = supported.get(kind, ())
    if not alike:
        return f"{said} is not supported yet, nor is any model of its kind. Supported are {', '.join(every)}"
    return f"{said} is not supported yet, nor is its family. Supported of its kind are {', '.join(sorted(alike))}"


def _family(architecture: str) -> str:
    name = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture)
    return re.split(r"[0-9_]|(?<=[a-z])(?=Moe|MoE|Next|X$)", name)[0].lower()


def _has_experts(architecture: str, config: Mapping[str, Any]) -> bool:
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return bool(re.search(_SEVERAL, architecture.lower())) or any(config.get(key) for key in keys)
