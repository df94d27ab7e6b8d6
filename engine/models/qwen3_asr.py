"""Qwen3-ASR: an encoder of audio in chunks, whose windows attend to one another, projected to a Qwen3 decoder.

Source: transformers modeling_qwen3_asr.py, processing_qwen3_asr.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.bart import side_block
from engine.models.config import MAX_LAYERS, Config
from engine.models.llava import whole
from engine.models.media import ChunkedAudio, Media, Project, Projector, Tower
from engine.models.parts import Body, LayerNorm, ResidualBlock, named

ARCHITECTURES = ("Qwen3ASRForConditionalGeneration",)
MAX_MELS, MAX_CHUNK = 1024, 1 << 16
_DEFAULTS: dict[str, Any] = {
    **{"num_mel_bins": 128, "d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16},
    **{"encoder_ffn_dim": 4096, "activation_function": "gelu", "scale_embedding": False, "n_window": 50},
    **{"n_window_infer": 800, "output_dim": 3584, "downsample_hidden_size": 480},
}
_NAMES = {
    **{"d_model": "hidden_size", "encoder_layers": "num_hidden_layers"},
    **{"encoder_attention_heads": "num_attention_heads", "encoder_ffn_dim": "intermediate_size"},
}
AUDIO_TOKEN = 151_676
TRANSCRIPTION = (
    "<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\n<|audio_start|>{audio}<|audio_end|><|im_end|>\n"
    "<|im_start|>assistant\n{language}",
    "language {name}<asr_text>",
    "<asr_text>",
)
"""Prompt of a transcription, text of its language, and text before the transcript in a reply without a language."""


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, tower = chunked_tower(config, hidden)
    act, width = c.activation("activation_function"), tower.hidden
    projector = Projector(
        steps=(
            named(LayerNorm(size=width, eps=1e-5), "audio_tower.ln_post"),
            Project(linear=whole("multi_modal_projector.linear_1", width, width), act=act),
            Project(linear=whole("multi_modal_projector.linear_2", width, hidden)),
        )
    )
    outer = Config.of({key: value for key, value in config.items() if key != "text_config"}, audio_token_id=AUDIO_TOKEN)
    return Media(tower=tower, projectors=(projector,), hidden=hidden, token=outer.whole("audio_token_id", least=0))


def chunked_tower(
    config: Mapping[str, Any], hidden: int, *, fills: bool = True, **defaults: Any
) -> tuple[Config, Tower]:
    """Return the settings in `audio_config` and the encoder. fills: a clip of less than a chunk is padded to one."""
    audio = config.get("audio_config")
    c = Config.of(audio if isinstance(audio, Mapping) else {}, _NAMES, **{**_DEFAULTS, **defaults})
    if c.flag("scale_embedding"):
        raise CheckpointError("config.json: audio_config.scale_embedding is true; supported is false")
    width, chunk = c.whole("d_model"), 2 * c.whole("n_window", most=MAX_CHUNK)
    window, rest = divmod(c.whole("n_window_infer"), chunk)
    if rest or not window or width % 2 or width < 4:
        raise CheckpointError(
            f"config.json: n_window_infer of audio_config is {c.whole('n_window_infer')} and its width {width}; the "
            f"first must be a multiple of 2 n_window, {chunk}, and the second an even number of at least 4"
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
        patches=ChunkedAudio(
            mels=c.whole("num_mel_bins", most=MAX_MELS),
            hidden=width,
            channels=c.whole("downsample_hidden_size"),
            chunk=chunk,
            window=window,
            fills=fills,
        ),
        blocks=(side_block(c, "encoder", branch),) * layers,
        layers="layers",
        taken=(layers,),
    )
    return c, tower
