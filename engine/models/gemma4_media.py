"""Gemma 4 with images, videos and audio: a tower over patches at any aspect ratio, whose squares are averaged, and a
Conformer with local attention.

The tower's blocks have norms before and after attention and MLP. The first half of a head is rotated by the column of a
patch, the second by its row. Source: transformers modeling_gemma4.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.llava import whole
from engine.models.media import (
    AveragePool,
    GridRope,
    Media,
    NormedAudio,
    Patches,
    PatchPositions,
    Project,
    Projector,
    Tower,
)
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Convolution,
    LocalAttention,
    ResidualBlock,
    RMSNorm,
    Rope,
    named,
)
from engine.models.towers import vision_config

ARCHITECTURES = ("Gemma4ForConditionalGeneration",)
_TOWER: dict[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12},
    **{"num_key_value_heads": 12, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
    **{"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240},
}
_AUDIO: dict[str, Any] = {
    **{"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "hidden_act": "silu"},
    **{"subsampling_conv_channels": [128, 32], "conv_kernel_size": 5, "residual_weight": 0.5},
    **{"attention_chunk_size": 12, "attention_context_left": 13, "attention_context_right": 0},
    **{"attention_logit_cap": 50.0, "use_clipped_linears": True, "rms_norm_eps": 1e-6, "gradient_clipping": 1e10},
    **{"output_proj_dims": 1536},
}
MAX_KERNEL, MAX_WINDOW = 1 << 10, 1 << 12
_TOKENS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
_HALVED = ("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.q_norm", "self_attn.k_norm")


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, eyes = Config.of(config, **_TOKENS), vision_config(config, **_TOWER)
    tower, eps = _tower(eyes), eyes.number("rms_norm_eps")
    # A norm of x · √hidden is a norm of x with a smaller eps.
    eps = eps if tower.standard else eps / eyes.hidden
    projector = Projector(
        root="embed_vision",
        steps=(
            AveragePool(side=eyes.whole("pooling_kernel_size")),
            RMSNorm(size=eyes.hidden, eps=eps, weight=False, name="embedding_pre_projection_norm"),
            Project(linear=whole("embedding_projection", eyes.hidden, hidden, bias=False)),
        ),
    )
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    sight = text.get("use_bidirectional_attention")
    if sight not in (None, "vision"):
        raise CheckpointError(
            f'config.json: use_bidirectional_attention is {shown(sight)}; supported are null and "vision"'
        )
    pad = text.get("pad_token_id")
    media = Media(
        tower=tower,
        projectors=(projector,),
        hidden=hidden,
        token=c.whole("image_token_id"),
        video_token=c.whole("video_token_id"),
        layer_token=pad if isinstance(pad, int) else 0,
        audio=_audio(config, hidden, c.whole("audio_token_id"), pad if isinstance(pad, int) else 0),
    )
    return media if sight is None else replace(media, attention="item", windowed_items=True)


def _audio(config: Mapping[str, Any], hidden: int, token: int, layer_token: int) -> Media | None:
    inner = config.get("audio_config")
    if not isinstance(inner, Mapping):
        return None  # the larger models
    c = Config.of(inner, **_AUDIO)
    window, channels = c.whole("attention_context_left", most=MAX_WINDOW) - 1, c.values["subsampling_conv_channels"]
    if c.values["attention_context_right"] != 0 or c.values["attention_chunk_size"] != window or window < 1:
        raise CheckpointError(
            f"config.json: audio_config has chunks of {shown(c.values['attention_chunk_size'])} positions with "
            f"{window + 1} to the left and {shown(c.values['attention_context_right'])} to the right; supported are "
            "attention_chunk_size and one more to the left, and none to the right"
        )
    pair = isinstance(channels, list | tuple) and len(channels) == 2
    if not pair or not all(isinstance(one, int) and 4 <= one < 1 << 16 for one in channels) or channels[0] % 4:
        raise CheckpointError(
            f"config.json: subsampling_conv_channels of audio_config is {shown(channels)}; it must be two numbers, the "
            "first a multiple of 4"
        )
    if c.hidden % c.heads or c.hidden % 2:
        raise CheckpointError(
            f"config.json: hidden_size of audio_config is {c.hidden}; it must be an even multiple of "
            f"num_attention_heads, {c.heads}"
        )
    embedding = NormedAudio(hidden=c.hidden, channels=(channels[0], channels[1]), eps=c.number("rms_norm_eps"))
    width = c.whole("output_proj_dims")
    projector = Projector(
        steps=(
            Project(linear=whole("audio_tower.output_proj", c.hidden, width)),
            RMSNorm(size=width, eps=embedding.eps, weight=False, name="embedding_pre_projection_norm"),
            Project(linear=whole("embed_audio.embedding_projection", width, hidden, bias=False)),
        ),
    )
    return Media(
        tower=Tower(
            root="audio_tower",
            patches=embedding,
            blocks=(_hearing_block(c, window),) * c.layers,
            layers="layers",
            taken=(c.layers,),
        ),
        projectors=(projector,),
        hidden=hidden,
        token=token,
        layer_token=layer_token,
    )


def _hearing_block(c: Config, window: int) -> Block:
    """Return a block of the Conformer."""
    size, act, limit, clipped = c.hidden, c.activation(), c.positive("gradient_clipping"), c.flag("use_clipped_linears")
    norm, other = RMSNorm(size=size, eps=1e-6), RMSNorm(size=size, eps=c.number("rms_norm_eps"))
    attention = LocalAttention(
        hidden=size,
        heads=c.heads,
        window=window,
        softcap=c.positive("attention_logit_cap"),
        clipped=clipped,
    )
    convolution = Convolution(
        hidden=size,
        kernel=c.whole("conv_kernel_size", most=MAX_KERNEL),
        gate_act="sigmoid",
        act=act,
        into="linear_start.linear",
        filters="depthwise_conv1d",
        out="linear_end.linear",
        norm=replace(other, name="conv_norm"),
        limit=limit,
        clipped=clipped,
        name="lconv1d",
    )
    first, last = (
        ResidualBlock(
            before=named(norm, f"feed_forward{number}.pre_layer_norm"),
            body=MLP(
                hidden=size,
                intermediate_size=4 * size,
                act=act,
                gate=None,
                up="ffw_layer_1.linear",
                down="ffw_layer_2.linear",
                clipped=clipped,
                name=f"feed_forward{number}",
            ),
            after=named(norm, f"feed_forward{number}.post_layer_norm"),
            scale=c.number("residual_weight"),
            limit=limit,
        )
        for number in (1, 2)
    )
    return (
        first,
        ResidualBlock(
            before=named(norm, "norm_pre_attn"), body=attention, after=named(norm, "norm_post_attn"), limit=limit
        ),
        ResidualBlock(before=named(other, "lconv1d.pre_layer_norm"), body=convolution),
        replace(last, last=named(norm, "norm_out")),
    )


def _tower(c: Config) -> Tower:
    dim, patch, parameters = c.head_dim, c.whole("patch_size"), c.values.get("rope_parameters")
    if dim % 4:
        raise CheckpointError(f"config.json: the tower's heads have {dim} dimensions; it must be a multiple of 4")
    inside = Config({"rope_theta": 100.0, **(parameters if isinstance(parameters, Mapping) else {})}, c.names)
    exponents = tuple(4 * pair / dim for pair in range(dim // 4)) * 2
    rope = Rope(dim=dim, theta=inside.positive("rope_theta"))
    patches = Patches(
        source="patch_embedder.input_proj",
        hidden=c.hidden,
        size=patch,
        flat=True,
        dimensions=0,
        bias=False,
        factor=2.0,
        offset=-1.0,
    )
    side = c.whole("position_embedding_size")
    table = "patch_embedder.position_embedding_table"
    return Tower(
        root="vision_tower",
        patches=patches,
        positions=PatchPositions(name=table, side=side, fit="axes", stored=(2, side, c.hidden)),
        blocks=(_block(c, rope),) * c.layers,
        taken=(c.layers,),
        layers="encoder.layers",
        rope=GridRope(rope=rope, axes=(1,) * (dim // 4) + (0,) * (dim // 4), exponents=exponents),
        halved=_HALVED,
        standard=("std_bias", "std_scale") if c.flag("standardize") else None,
        factor=c.hidden**0.5,
    )


def _block(c: Config, rope: Rope) -> Block:
    eps, clipped, bias = c.number("rms_norm_eps"), c.flag("use_clipped_linears"), c.flag("attention_bias")
    if bias:
        raise CheckpointError("config.json: attention_bias of vision_config is true; supported is false")
    norm, head = RMSNorm(size=c.hidden, eps=eps), RMSNorm(size=c.head_dim, eps=eps)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=rope,
        scale=1.0,
        qk_norm=head,
        v_norm=replace(head, weight=False, name="v_norm"),
        causal=False,
        clipped=clipped,
        sources=("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"),
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation("hidden_activation"),
        gate="gate_proj.linear",
        up="up_proj.linear",
        down="down_proj.linear",
        clipped=clipped,
    )
    seen = "input_layernorm", "post_attention_layernorm"
    fed = "pre_feedforward_layernorm", "post_feedforward_layernorm"
    return (
        ResidualBlock(before=named(norm, seen[0]), body=attention, after=named(norm, seen[1])),
        ResidualBlock(before=named(norm, fed[0]), body=mlp, after=named(norm, fed[1])),
    )
