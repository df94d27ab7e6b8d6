"""Qwen2.5-Omni, the part that reads media and replies with text (thinker): Qwen2.5-VL's tower for images and videos,
and an encoder of audio in chunks.

The text model is Qwen2 with M-RoPE. Tokens of audio have the positions of text; a second of a video has
`position_id_per_seconds` positions. The parts that generate speech (talker, token2wav) are not read. Source:
transformers modeling_qwen2_5_omni.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.bart import side_block
from engine.models.config import MAX_LAYERS, Config
from engine.models.llava import whole
from engine.models.media import AverageRows, Media, Project, Projector, Tower
from engine.models.parts import AudioEmbedding, Body, LayerNorm, ResidualBlock, named
from engine.models.qwen_vl import qwen2_5_media
from engine.models.thinker import QWEN2_5_OMNI, THINKERS
from engine.models.towers import text_sections

ARCHITECTURES = tuple(name for name, thinker in THINKERS.items() if thinker == QWEN2_5_OMNI)
MAX_MELS, MAX_CHUNK = 1024, 1 << 16
_AUDIO: dict[str, Any] = {
    **{"num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20},
    **{"encoder_ffn_dim": 5120, "max_source_positions": 1500, "activation_function": "gelu", "scale_embedding": False},
    **{"n_window": 100, "output_dim": 3584},
}
_TOKENS = {"audio_token_index": 151_646, "image_token_index": 151_655, "video_token_index": 151_656}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c = Config.of(config, **{name: config.get(name.replace("index", "id"), token) for name, token in _TOKENS.items()})
    rate = Config.of(config, position_id_per_seconds=25).number("position_id_per_seconds")
    visual = qwen2_5_media({**config, "vision_config": _vision(config)}, hidden, ("q", "k", "v"))
    assert visual.positions is not None, "Qwen has positions in three directions"
    positions = replace(
        visual.positions, sections=text_sections(config, (16, 24, 24)), tokens_per_second=rate, after_time=True
    )
    return replace(
        visual,
        token=c.whole("image_token_index", least=0),
        video_token=c.whole("video_token_index", least=0),
        positions=positions,
        audio=_audio(config, hidden, c.whole("audio_token_index", least=0)),
    )


def _vision(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tower's settings, without the rate of positions, which is not one of them."""
    found = config.get("vision_config")
    return {**(found if isinstance(found, Mapping) else {}), "tokens_per_second": 1}


def _audio(config: Mapping[str, Any], hidden: int, token: int) -> Media:
    audio = config.get("audio_config")
    c = Config.of(audio if isinstance(audio, Mapping) else {}, **_AUDIO)
    if c.flag("scale_embedding"):
        raise CheckpointError("config.json: audio_config.scale_embedding is true; supported is false")
    width, window = c.whole("d_model"), c.whole("n_window", most=MAX_CHUNK)
    if window % 2 or width % 2 or width < 4:
        raise CheckpointError(
            f"config.json: n_window of audio_config is {window} and d_model {width}; both must be even, and d_model at "
            "least 4"
        )
    if c.whole("output_dim") != hidden:
        raise CheckpointError(
            f"config.json: output_dim of audio_config is {c.whole('output_dim')}; it must be the width of the text "
            f"model, {hidden}"
        )
    norm = LayerNorm(size=width, eps=1e-5)

    def branch(body: Body, name: str) -> ResidualBlock:
        return ResidualBlock(body=body, before=named(norm, name))

    layers = c.whole("encoder_layers", most=MAX_LAYERS)
    tower = Tower(
        root="audio_tower",
        patches=AudioEmbedding(
            mels=c.whole("num_mel_bins", most=MAX_MELS), hidden=width, positions=window, chunk=2 * window
        ),
        blocks=(side_block(c, "encoder", branch, key_bias=False),) * layers,
        layers="layers",
        taken=(layers,),
        unread=("audio_bos_eos_token",),  # markers that prompts have as tokens
    )
    projector = Projector(
        steps=(
            AverageRows(count=2),
            named(norm, "audio_tower.ln_post"),
            Project(linear=whole("audio_tower.proj", width, hidden)),
        )
    )
    return Media(tower=tower, projectors=(projector,), hidden=hidden, token=token)
