"""Qwen3-Omni, the part that reads media and replies with text (thinker): Qwen3-VL's tower for images and videos, and
Qwen3-ASR's encoder of audio.

The text model is Qwen3-MoE with M-RoPE. Tokens of audio have the positions of text; a second of a video has
`position_id_per_seconds` positions, rounded down to whole positions as in vLLM. The parts that generate speech (talker,
code2wav) are not read. Source: transformers modeling_qwen3_omni_moe.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.llava import whole
from engine.models.media import Media, Project, Projector
from engine.models.parts import LayerNorm, named
from engine.models.qwen3_asr import chunked_tower
from engine.models.qwen_vl import MergerNames, qwen3_media
from engine.models.thinker import QWEN3_OMNI, THINKERS
from engine.models.towers import text_sections

ARCHITECTURES = tuple(name for name, thinker in THINKERS.items() if thinker == QWEN3_OMNI)
_NAMES = MergerNames(norm="ln_q", first="mlp.0", second="mlp.2", deepstack="merger_list")
_TOKENS = {"audio_token_id": 151_646, "image_token_id": 151_655, "video_token_id": 151_656}
_AUDIO = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, rate = Config.of(config, **_TOKENS), Config.of(config, position_id_per_seconds=25)
    visual = qwen3_media(config, hidden, _NAMES)
    assert visual.positions is not None, "Qwen has positions in three directions"
    positions = replace(
        visual.positions,
        sections=text_sections(config, (24, 20, 20)),
        time="seconds",
        tokens_per_second=rate.number("position_id_per_seconds"),
        after_time=True,
    )
    return replace(
        visual,
        token=c.whole("image_token_id", least=0),
        video_token=c.whole("video_token_id", least=0),
        positions=positions,
        audio=_audio(config, hidden, c.whole("audio_token_id", least=0)),
    )


def _audio(config: Mapping[str, Any], hidden: int, token: int) -> Media:
    c, tower = chunked_tower(config, hidden, fills=False, **_AUDIO)
    act = c.activation("activation_function")
    projector = Projector(
        steps=(
            named(LayerNorm(size=tower.hidden, eps=1e-5), "audio_tower.ln_post"),
            Project(linear=whole("audio_tower.proj1", tower.hidden, tower.hidden), act=act),
            Project(linear=whole("audio_tower.proj2", tower.hidden, hidden)),
        )
    )
    return Media(tower=tower, projectors=(projector,), hidden=hidden, token=token)
