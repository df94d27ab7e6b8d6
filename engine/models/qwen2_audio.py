"""Qwen2-Audio: Whisper's encoder, whose states are averaged in pairs and projected to embeddings of a Qwen2 decoder.

Only the frames of the clip attend to one another, not the silence after it. Source: transformers
modeling_qwen2_audio.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.bart import side_block
from engine.models.config import MAX_LAYERS, Config
from engine.models.llava import whole
from engine.models.media import AverageRows, Media, Project, Projector, Tower
from engine.models.parts import AudioEmbedding, Body, LayerNorm, ResidualBlock, named

ARCHITECTURES = ("Qwen2AudioForConditionalGeneration",)
MAX_MELS = 1024
_DEFAULTS: dict[str, Any] = {
    **{"num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20},
    **{"encoder_ffn_dim": 5120, "max_source_positions": 1500, "activation_function": "gelu", "scale_embedding": False},
}
AUDIO_TOKEN = 151_646


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    audio = config.get("audio_config")
    c = Config.of(audio if isinstance(audio, Mapping) else {}, **_DEFAULTS)
    if c.flag("scale_embedding"):
        raise CheckpointError("config.json: audio_config.scale_embedding is true; supported is false")
    width = c.whole("d_model")
    norm = LayerNorm(size=width, eps=1e-5)

    def branch(body: Body, name: str) -> ResidualBlock:
        return ResidualBlock(body=body, before=named(norm, name))

    layers = c.whole("encoder_layers", most=MAX_LAYERS)
    mels, positions = c.whole("num_mel_bins", most=MAX_MELS), c.whole("max_source_positions")
    tower = Tower(
        root="audio_tower",
        patches=AudioEmbedding(mels=mels, hidden=width, positions=positions),
        blocks=(side_block(c, "encoder", branch, key_bias=False),) * layers,
        layers="layers",
        taken=(layers,),
    )
    projector = Projector(
        steps=(
            AverageRows(count=2),
            named(norm, "audio_tower.layer_norm"),
            Project(linear=whole("multi_modal_projector.linear", width, hidden)),
        )
    )
    given = Config.of(config, audio_token_index=config.get("audio_token_id", AUDIO_TOKEN))
    return Media(tower=tower, projectors=(projector,), hidden=hidden, token=given.whole("audio_token_index", least=0))
