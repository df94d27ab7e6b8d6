"""Registry of supported model families and their architectures.

A family is a module with `ARCHITECTURES`, the names in config.json that it supports, and `declare(config) -> Model`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from engine.api.errors import UnknownArchitecture
from engine.models import (
    afmoe,
    apertus,
    arcee,
    arctic,
    aria,
    baichuan,
    bailing_moe,
    bamba,
    bart,
    bert,
    bloom,
    cohere,
    cwm,
    deepseek,
    dual_encoders,
    ernie4_5,
    eurobert,
    exaone,
    falcon,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    hunyuan,
    internlm,
    jamba,
    jina_bert,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    longcat_flash,
    mamba,
    mamba2,
    mimo_v2,
    minicpm,
    minicpm3,
    minimax,
    minimax_m2,
    ministral,
    mixtral,
    modernbert,
    mpt,
    nemotron,
    nemotron_h,
    nomic_bert,
    olmo,
    olmo2,
    olmo_hybrid,
    olmoe,
    opt,
    persimmon,
    phi,
    phi3,
    phimoe,
    pooled_decoders,
    qwen1,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    recurrent_gemma,
    rotary_bert,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
    step3p5,
    t5,
    t5_encoder,
    whisper,
    zamba2,
)
from engine.models.multimodal import ARCHITECTURES as MULTIMODAL
from engine.models.parts import Model
from engine.models.unsupported import unsupported

Declare = Callable[[Mapping[str, Any]], Model]

DECODERS = (
    *(llama, qwen3, phi3, gemma, olmo2, granite, starcoder2, cohere, glm4, mixtral, qwen2_moe, qwen3_moe, olmoe),
    *(arcee, baichuan, bloom, ernie4_5, exaone, falcon, gpt2, gpt_neox, gptj, internlm, minicpm, ministral, mpt),
    *(nemotron, olmo, opt, phi, qwen1, seed_oss, smollm3, stablelm, glm4_moe, minimax_m2, deepseek, minicpm3),
    *(gpt_oss, llama4, hunyuan, afmoe, persimmon, apertus, phimoe, gemma4, gemma3n, mimo_v2, longcat_flash),
    *(step3p5, arctic, bailing_moe, cwm, aria),
)
RECURRENT = (
    *(bamba, falcon_h1, granite_hybrid, jamba, kimi_linear, lfm2, mamba, mamba2, minimax, nemotron_h, olmo_hybrid),
    *(qwen3_5, qwen3_next, recurrent_gemma, zamba2),
)
TRANSLATORS = (bart, t5)
SPEECH = (whisper,)
POOLED = (bert, dual_encoders, eurobert, jina_bert, modernbert, nomic_bert, pooled_decoders, rotary_bert, t5_encoder)
FAMILIES = (*DECODERS, *RECURRENT, *TRANSLATORS, *SPEECH, *POOLED)
ARCHITECTURES: dict[str, Declare] = {name: family.declare for family in FAMILIES for name in family.ARCHITECTURES}


KINDS = {
    "decoder": DECODERS,
    "recurrent": RECURRENT,
    "encoder-decoder": TRANSLATORS,
    "speech": SPEECH,
    "encoder": POOLED,
}


def declaration(architecture: str, config: Mapping[str, Any] | None = None) -> Declare:
    """Return the function that declares models of this architecture. Raises UnknownArchitecture, which suggests the
    closest supported one."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    supported = {kind: [name for family in of for name in family.ARCHITECTURES] for kind, of in KINDS.items()}
    supported["vision"] = list(MULTIMODAL)
    raise UnknownArchitecture(unsupported(architecture, config or {}, supported))
