"""Encoders of T5, mT5 and UMT5 alone, which embed (Sentence-T5, GTR): the mean of all states unless modules.json says
otherwise.

Source: transformers modeling_t5.py (T5EncoderModel).
"""

from collections.abc import Mapping
from typing import Any

from engine.models import t5
from engine.models.parts import Model, Pooler

_END, _WHOLE = "EncoderModel", "ForConditionalGeneration"
ARCHITECTURES = tuple(f"{family}{_END}" for family in ("T5", "MT5", "UMT5"))


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0].removesuffix(_END) + _WHOLE
    whole = t5.declare({**config, "architectures": [architecture]})
    encoder = whole.encoder
    assert encoder is not None, "T5 has an encoder"
    return Model(
        embed=whole.embed,
        blocks=encoder.blocks,
        norm=encoder.norm,
        head=None,
        max_context=encoder.max_encoder_input,
        root="",
        layers=encoder.layers,
        pooler=Pooler(task="embed", width=whole.embed.hidden, pool="mean", activation="normalize"),
        unread=("encoder.embed_tokens.", "decoder.", "lm_head."),
    )
