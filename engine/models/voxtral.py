"""Voxtral: Whisper's encoder over windows of 30 s, whose states are joined in groups and projected to embeddings of a
Llama decoder. Silence fills the last window and has embeddings too. Source: transformers modeling_voxtral.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.bart import side_block
from engine.models.config import MAX_LAYERS, Config
from engine.models.llava import whole
from engine.models.media import JoinRows, Media, Project, Projector, Tower
from engine.models.parts import AudioEmbedding, Body, LayerNorm, ResidualBlock, named

ARCHITECTURES = ("VoxtralForConditionalGeneration",)
MAX_MELS = 1024
_DEFAULTS: dict[str, Any] = {
    **{"num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20},
    **{"encoder_ffn_dim": 5120, "max_source_positions": 1500, "activation_function": "gelu", "scale_embedding": False},
}
_NAMES = {
    **{"d_model": "hidden_size", "encoder_layers": "num_hidden_layers"},
    **{"encoder_attention_heads": "num_attention_heads", "encoder_ffn_dim": "intermediate_size"},
}
AUDIO_TOKEN = 24
TRANSCRIPTION = ("<s>[INST][BEGIN_AUDIO]{audio}[/INST]{language}[TRANSCRIBE]", "lang:{code}", "")
"""Prompt of a transcription, and of its language, as mistral-common writes them; no marker."""


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    audio = config.get("audio_config")
    c = Config.of(audio if isinstance(audio, Mapping) else {}, _NAMES, **_DEFAULTS)
    if c.flag("scale_embedding"):
        raise CheckpointError("config.json: audio_config.scale_embedding is true; supported is false")
    width, inner = c.whole("d_model"), c.whole("encoder_ffn_dim")
    positions = c.whole("max_source_positions")
    count, rest = divmod(inner, width)
    if rest or not count or positions % count:
        raise CheckpointError(
            f"config.json: intermediate_size of audio_config is {inner}; it must be hidden_size, {width}, times a "
            f"divisor of max_source_positions, {positions}"
        )
    norm = LayerNorm(size=width, eps=1e-5)

    def branch(body: Body, name: str) -> ResidualBlock:
        return ResidualBlock(body=body, before=named(norm, name))

    layers = c.whole("encoder_layers", most=MAX_LAYERS)
    mels = c.whole("num_mel_bins", most=MAX_MELS)
    tower = Tower(
        root="audio_tower",
        patches=AudioEmbedding(mels=mels, hidden=width, positions=positions, complete=True),
        blocks=(side_block(c, "encoder", branch, key_bias=False),) * layers,
        layers="layers",
        taken=(layers,),
    )
    outer = Config.of(
        {key: value for key, value in config.items() if key != "text_config"},
        audio_token_id=AUDIO_TOKEN,
        projector_hidden_act="gelu",
    )
    act = outer.activation("projector_hidden_act")
    projector = Projector(
        steps=(
            named(norm, "audio_tower.layer_norm"),
            JoinRows(count=count),
            Project(linear=whole("multi_modal_projector.linear_1", inner, hidden, bias=False), act=act),
            Project(linear=whole("multi_modal_projector.linear_2", hidden, hidden, bias=False)),
        )
    )
    return Media(tower=tower, projectors=(projector,), hidden=hidden, token=outer.whole("audio_token_id", least=0))
