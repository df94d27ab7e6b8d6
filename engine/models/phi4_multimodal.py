"""Phi-4-multimodal: a tower like SigLIP's for images in tiles, and a Conformer for audio clips.

The text model is Phi-4-mini. The adapters for images and speech that Microsoft publishes with it are LoRA adapters of
the text model (`adapters` of the manifest). Source: transformers modeling_phi4_multimodal.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import MAX_LAYERS, Config
from engine.models.llava import whole
from engine.models.media import AveragePool, JoinTiles, Media, Project, Projector, StoredTensor, SubsampledAudio, Tower
from engine.models.parts import MLP, Attention, Block, Convolution, DistanceTable, LayerNorm, ResidualBlock, named
from engine.models.towers import patches_per_side, siglip_tower, vision_config

ARCHITECTURES = ("Phi4MultimodalForCausalLM",)
MAX_MELS, MAX_KERNEL, MAX_REDUCTION, MAX_MULTIPLIER, MAX_DISTANCE = 1024, 1 << 10, 1 << 6, 1 << 6, 1 << 16
WINDOW = 500  # positions of a clip that attend to one another
_INTO, _INNER, _OUT = "glu.ext_pw_conv_1d", "dw_sep_conv_1d.pw_conv", "ext_pw_conv_1d"
"""Projections that are stored as convolutions."""

_VISION: dict[str, Any] = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"image_size": 448, "patch_size": 14, "crop_size": 448, "feature_layer": -2, "image_token_id": 200_010},
}
_AUDIO: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24, "num_attention_heads": 16},
    **{"activation": "swish", "conv_activation": "swish", "conv_glu_type": "swish", "nemo_activation": "relu"},
    **{"chunk_size": -1, "ext_pw_out_channel": 1024, "depthwise_separable_out_channel": 1024},
    **{"depthwise_multiplier": 1, "kernel_size": 3, "input_size": 80, "time_reduction": 8, "bias_max_distance": 1000},
    **{"bias_symmetric": False, "nemo_conv_channels": 1024, "downsample_rate": 1, "audio_token_id": 200_011},
}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c = vision_config(config, **_VISION)
    tower = siglip_tower(config, (_feature_layer(c),), **_VISION)
    side = patches_per_side(c)
    if side % 2 or c.whole("crop_size") != c.whole("image_size"):
        raise CheckpointError(
            f"config.json: vision_config has tiles of {c.whole('crop_size')} pixels and {side} patches in a row; "
            "supported are an even number of patches, and a crop_size that equals image_size"
        )
    assert tower.positions is not None, "SigLIP has learned positions"
    root, width = "image_embed", tower.hidden
    ends = JoinTiles(width=width, row_end="sub_img_feature_extensor", between="global_img_feature_extensor")
    project = (
        Project(linear=whole("img_projection_up", width, hidden), act="gelu"),
        Project(linear=whole("img_projection_down", hidden, hidden)),
    )
    return Media(
        tower=replace(
            tower,
            root=f"{root}.img_processor",
            positions=replace(tower.positions, fit="nearest"),
            completed=2,
        ),
        projectors=(Projector(root=root, steps=(AveragePool(side=2), ends, *project)),),
        hidden=hidden,
        token=c.whole("image_token_id", least=0),
        audio=_audio(config, hidden),
    )


def _feature_layer(c: Config) -> int:
    value = c.values["feature_layer"]
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config.json: feature_layer of vision_config is {value!r}; it must be a whole number")
    return value


def _audio(config: Mapping[str, Any], hidden: int) -> Media:
    inner = config.get("audio_config")
    c = Config.of(inner if isinstance(inner, dict) else {}, **_AUDIO)
    width, reduction = c.hidden, c.whole("time_reduction", most=MAX_REDUCTION)
    for key, supported in (
        ("ext_pw_out_channel", width),
        ("depthwise_separable_out_channel", width),
        ("downsample_rate", 1),
        ("chunk_size", -1),
    ):
        if c.values[key] != supported:
            raise CheckpointError(f"config.json: {key} of audio_config is {c.values[key]!r}; supported is {supported}")
    if reduction < 2 or reduction & (reduction - 1) or width % c.heads:
        raise CheckpointError(
            f"config.json: audio_config has a time_reduction of {reduction} and {c.heads} heads for a hidden_size of "
            f"{width}; the first must be a power of two of at least 2, and the last a multiple of the number of heads"
        )
    embedding = SubsampledAudio(
        mels=c.whole("input_size", most=MAX_MELS),
        hidden=width,
        act=c.activation("nemo_activation"),
        channels=c.whole("nemo_conv_channels"),
        reduction=reduction,
    )
    root, layers = "audio_embed", c.whole("num_blocks", most=MAX_LAYERS)

    def projector(kind: str) -> Projector:
        return Projector(
            root=root,
            steps=(
                Project(linear=whole(f"up_proj_for_{kind}", width, hidden), act="gelu"),
                Project(linear=whole(f"down_proj_for_{kind}", hidden, hidden)),
            ),
        )

    return Media(
        tower=Tower(
            root=f"{root}.encoder",
            patches=embedding,
            blocks=(_block(c),) * layers,
            layers="encoders",
            taken=(layers,),
            clip_window=WINDOW,
            renamed=_renamed(c),
        ),
        projectors=(projector("speech"), projector("vision_speech")),
        hidden=hidden,
        token=c.whole("audio_token_id", least=0),
        beside_images=True,
    )


def _block(c: Config) -> Block:
    """Return a block of the Conformer."""
    norm = LayerNorm(size=c.hidden, eps=1e-5)
    table = DistanceTable(
        max_distance=c.whole("bias_max_distance", most=MAX_DISTANCE),
        symmetric=c.flag("bias_symmetric"),
        source="relative_attention_bias_layer.bias_values",
    )
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.hidden // c.heads,
        rope=None,
        bias=(True, True),
        causal=False,
        relative=table,
    )
    convolution = Convolution(
        hidden=c.hidden,
        kernel=c.whole("kernel_size", most=MAX_KERNEL),
        gate_act=c.activation("conv_glu_type"),
        act=c.activation("conv_activation"),
        into=_INTO,
        filters="dw_sep_conv_1d.dw_conv",
        inner=_INNER,
        out=_OUT,
        bias=True,
        multiplier=c.whole("depthwise_multiplier", most=MAX_MULTIPLIER),
        name="conv",
    )
    feeds = (
        MLP(
            hidden=c.hidden,
            intermediate_size=c.intermediate_size,
            act=c.activation("activation"),
            bias=True,
            gate="gate_up_proj",
            up="gate_up_proj",
            up_first=True,
            name=f"feed_forward_{side}",
        )
        for side in ("in", "out")
    )
    first, last = (ResidualBlock(before=named(norm, f"{mlp.name}.layer_norm"), body=mlp, scale=0.5) for mlp in feeds)
    return (
        first,
        ResidualBlock(before=named(norm, "layer_norm_att"), body=attention),
        ResidualBlock(before=named(norm, "conv.layer_norm"), body=convolution),
        replace(last, last=named(norm, "layer_norm")),
    )


def _renamed(c: Config) -> tuple[tuple[str, StoredTensor], ...]:
    """Return the projections that are stored as convolutions. The first has a second bias, in two tensors."""
    size, filters = c.hidden, c.hidden * c.whole("depthwise_multiplier", most=MAX_MULTIPLIER)
    shapes = {_INTO: (2 * size, size, 1), _INNER: (size, filters, 1), _OUT: (size, size, 1)}
    found = {
        f"conv.{name}.weight": StoredTensor(name=f"conv.{name}.weight", shape=shape) for name, shape in shapes.items()
    }
    added = tuple(StoredTensor(name=f"conv.glu.{name}", shape=(1, size, 1)) for name in ("b1", "b2"))
    bias = f"conv.{_INTO}.bias"
    return (*found.items(), (bias, StoredTensor(name=bias, shape=(2 * size,), added=added)))
