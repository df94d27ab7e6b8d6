"""Tensors of the tower and the projectors of images and videos, as declared in `engine.models.parts`.

A tower is an encoder over patches: its blocks are those of text models, with bidirectional attention among the patches
of a frame. Projectors turn its features into embeddings of the text model's width. Names are those of the checkpoint.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from engine.models.parts import (
    MLP,
    Activate,
    Attention,
    AttentionPool,
    AudioEmbedding,
    AveragePool,
    AverageRows,
    Block,
    Blocks,
    ChunkedAudio,
    ClassRow,
    GridPositions,
    GridRope,
    JoinRows,
    JoinTiles,
    Media,
    Merge,
    NormedAudio,
    Patches,
    PatchPositions,
    Perceiver,
    Project,
    Projector,
    ProjectorStep,
    QFormer,
    Querying,
    Resampler,
    RowStep,
    StoredTensor,
    SubsampledAudio,
    Tiles,
    Tower,
    WindowMerge,
    bodies,
)
from engine.models.sources import (
    Shapes,
    audio_sources,
    bias_sources,
    branch_sources,
    join,
    linear_sources,
    mlp_linears,
    norm_sources,
)

__all__ = [
    "Activate",
    "AttentionPool",
    "AudioEmbedding",
    "AveragePool",
    "AverageRows",
    "Blocks",
    "ChunkedAudio",
    "ClassRow",
    "GridPositions",
    "GridRope",
    "JoinRows",
    "JoinTiles",
    "NormedAudio",
    "Media",
    "Merge",
    "PatchPositions",
    "Patches",
    "Perceiver",
    "Project",
    "Projector",
    "ProjectorStep",
    "QFormer",
    "Querying",
    "Resampler",
    "RowStep",
    "StoredTensor",
    "SubsampledAudio",
    "Tiles",
    "Tower",
    "WindowMerge",
    "block_path",
    "media_sources",
    "media_tensors",
    "pooling_heads",
    "projector_tensors",
]


def tokens_per_image(media: Media) -> int:
    """Return the number of embeddings of an image whose size the tower's table of positions determines; 0 if images
    have other sizes."""
    positions = media.tower.positions
    if positions is None or positions.fit != "none":
        return 0
    joined = 1
    for step in media.projectors[0].steps:
        joined *= step.side if isinstance(step, Merge | AveragePool) else 1
    return (positions.side // joined) ** 2


def pooling_heads(media: Media) -> tuple[tuple[Querying, str], ...]:
    """Return the parts of all projectors that attend to the rows of a frame, with their paths."""
    steps = ((step, one.root) for one in media.projectors for step in one.steps)
    return tuple(
        (step, join(root, step.name) if isinstance(step, AttentionPool) else root)
        for step, root in steps
        if isinstance(step, Querying)
    )


def tile_vectors(media: Media) -> tuple[tuple[JoinTiles, str], ...]:
    """Return the steps that join tiles, with their paths."""
    return tuple((step, one.root) for one in media.projectors for step in one.steps if isinstance(step, JoinTiles))


PREFIX_TEXT = 512  # tokens of text that a prompt with bidirectional attention has room for beside an image


def bidirectional_tokens(media: Media | None) -> int:
    """Return the number of tokens that attend to one another and that a step must have room for by default; 0 if
    attention is causal."""
    if media is None or media.attention == "causal":
        return 0
    return tokens_per_image(media) + (PREFIX_TEXT if media.attention == "prefix" else 0)


def block_path(tower: Tower, index: int) -> str:
    return join(tower.root, tower.layers, str(index))


def media_tensors(media: Media) -> dict[str, StoredTensor]:
    """Return what layers read, by name, in the order of the computation."""
    tower = media.tower
    found = dict(_tower_tensors(tower))
    for projector in media.projectors:
        found |= projector_tensors(projector)
    if media.tiles is not None:
        found[media.tiles.newline] = StoredTensor(name=media.tiles.newline, shape=(media.tiles.width,))
    return found


def projector_tensors(projector: Projector) -> dict[str, StoredTensor]:
    """Return the tensors of a projector, by the names that its layers read."""
    shapes: Shapes = {}
    for step in projector.steps:
        shapes |= _step_sources(step, projector.root)
    found = {
        own: StoredTensor(name=name, shape=shape) for name, shape in shapes.items() for own in _names_of_layers(name)
    }
    for name, stored in projector.renamed:
        found[join(projector.root, name)] = placed(stored, projector.root)
    return found


def _names_of_layers(name: str) -> tuple[str, ...]:
    """Return the names under which layers read a tensor. torch.nn.MultiheadAttention has the rows of q, k and v in one
    tensor, which has a name for each projection."""
    found = re.fullmatch(r"(.*)in_proj_(weight|bias)", name)
    return (name,) if found is None else tuple(f"{found[1]}in_proj_{one}.{found[2]}" for one in ("q", "k", "v", "kv"))


def unlowered_tensors(media: Media) -> tuple[str, ...]:
    """Return the names of the tensors that are not weights of the tower's programs."""
    tower, tiles = media.tower, media.tiles
    found = [] if tower.positions is None else [join(tower.root, tower.positions.name)]
    found += [join(tower.root, tower.class_token)] if tower.class_token else []
    found += [join(tower.root, name) for name in tower.standard or ()]
    if not isinstance(tower.patches, Patches):
        found += _input_sources(tower)
    found += [name for head, path in pooling_heads(media) if (name := query_table(head, path))]
    for step, path in tile_vectors(media):
        found += joined_tile_sources(step, path)
    return (*found, *(() if tiles is None else (tiles.newline,)))


def chunked_sources(part: ChunkedAudio, root: str) -> Shapes:
    """Return the tensors of a chunked embedding of audio."""
    found: Shapes = {}
    for name, inputs in zip(part.convolutions, (1, part.channels, part.channels), strict=True):
        found[join(root, name, "weight")] = (part.channels, inputs, 3, 3)
        found[join(root, name, "bias")] = (part.channels,)
    return found | {join(root, part.out, "weight"): (part.hidden, part.channels * part.bands)}


def subsampled_sources(part: SubsampledAudio, root: str) -> Shapes:
    """Return the tensors of the embedding of Phi-4's spectrograms."""
    found: Shapes = {join(root, "encoder_embedding", name): (part.mels,) for name in ("global_mean", "global_invstd")}
    channels = part.channels
    shapes: Shapes = {"embed.conv.0": (channels, 1, 3, 3), "embed.out": (part.hidden, channels * part.bands)}
    for number in range(1, part.halvings):
        shapes[f"embed.conv.{3 * number - 1}"] = (channels, 1, 3, 3)
        shapes[f"embed.conv.{3 * number}"] = (channels, channels, 1, 1)
    for name, shape in shapes.items():
        found |= {join(root, name, "weight"): shape, join(root, name, "bias"): shape[:1]}
    return found


def normed_sources(part: NormedAudio, root: str) -> Shapes:
    """Return the tensors of the embedding of Gemma 4's spectrograms."""
    embed, (first, second) = join(root, "subsample_conv_projection"), part.channels
    found: Shapes = {join(embed, "input_proj_linear.weight"): (part.hidden, part.bands * second)}
    for number, (inputs, outputs) in enumerate(((1, first), (first, second))):
        found[join(embed, f"layer{number}.conv.weight")] = (outputs, inputs, 3, 3)
        found[join(embed, f"layer{number}.norm.weight")] = (outputs,)
    return found


def joined_tile_sources(step: JoinTiles, path: str) -> Shapes:
    return {join(path, step.row_end): (1, 1, 1, step.width), join(path, step.between): (1, 1, step.width)}


def pooling_head_sources(head: AttentionPool, path: str) -> Shapes:
    """Return the tensors of a pooling head. Those of its attention have the names of torch.nn.MultiheadAttention."""
    size, inside = head.hidden, join(path, "attention")
    found: Shapes = {
        join(path, "probe"): (1, 1, size),
        join(inside, "in_proj_weight"): (3 * size, size),
        join(inside, "in_proj_bias"): (3 * size,),
        join(inside, "out_proj.weight"): (size, size),
        join(inside, "out_proj.bias"): (size,),
    }
    found |= norm_sources(head.norm, path, (size,))
    for linear in mlp_linears(head.mlp):
        found |= linear_sources(linear, join(path, head.mlp.name))
    return found


def querying_sources(part: Querying, path: str) -> Shapes:
    """Return the tensors of a step in which queries attend to rows."""
    match part:
        case AttentionPool():
            return pooling_head_sources(part, path)
        case Resampler():
            return resampler_sources(part, path)
        case QFormer():
            return qformer_sources(part, path)
        case Perceiver():
            return perceiver_sources(part, path)
        case WindowMerge():
            return window_merge_sources(part, path)


def query_table(part: Querying, path: str) -> str:
    """Return the name of the tensor of the learned queries; "" if there are none."""
    names = {AttentionPool: "probe", Resampler: "query", QFormer: "query_tokens", WindowMerge: ""}
    name = names.get(type(part), "perceiver_resampler.latents")
    return join(path, name) if name else ""


def qformer_sources(part: QFormer, path: str) -> Shapes:
    """Return the tensors of a Q-Former, with the names of BERT."""
    size, wide = part.hidden, part.intermediate_size
    found: Shapes = {join(path, "query_tokens"): (1, part.queries, size)}

    def both(name: str, *shape: int) -> None:
        found[join(path, "qformer", f"{name}.weight")] = shape
        found[join(path, "qformer", f"{name}.bias")] = shape[:1]

    both("layernorm", size)
    for index in range(part.layers):
        layer, kinds = f"encoder.layer.{index}", {"attention": size}
        kinds |= {"crossattention": part.inputs} if index % part.every == 0 else {}
        for kind, inputs in kinds.items():
            both(f"{layer}.{kind}.attention.query", size, size)
            both(f"{layer}.{kind}.attention.key", size, inputs)
            both(f"{layer}.{kind}.attention.value", size, inputs)
            both(f"{layer}.{kind}.output.dense", size, size)
            both(f"{layer}.{kind}.output.LayerNorm", size)
        both(f"{layer}.intermediate_query.dense", wide, size)
        both(f"{layer}.output_query.dense", size, wide)
        both(f"{layer}.output_query.LayerNorm", size)
    return found


def perceiver_sources(part: Perceiver, path: str) -> Shapes:
    """Return the tensors of a perceiver resampler."""
    size, root = part.hidden, join(path, "perceiver_resampler")
    found: Shapes = {join(root, "latents"): (part.queries, size), join(root, "norm.weight"): (size,)}
    for layer in (join(root, f"layers.{index}") for index in range(part.layers)):
        for name in ("input_latents_norm", "input_context_norm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = (size,)
        queries, keys = part.heads * part.head_dim, part.kv_heads * part.head_dim
        found[f"{layer}.self_attn.q_proj.weight"] = (queries, size)
        found |= {f"{layer}.self_attn.{name}_proj.weight": (keys, size) for name in "kv"}
        found[f"{layer}.self_attn.o_proj.weight"] = (size, queries)
        found |= {f"{layer}.mlp.{name}_proj.weight": (4 * size, size) for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (size, 4 * size)
    return found


def window_merge_sources(part: WindowMerge, path: str) -> Shapes:
    """Return the tensors of a merge of squares."""
    size, wide, root = part.hidden, part.hidden * part.rows, join(path, part.name)
    shapes: Shapes = {f"self_attn.{name}_proj": (size, size) for name in ("q", "k", "v", "out")}
    shapes |= {"layer_norm1": (size,), "pre_norm": (wide,)}
    shapes |= {"linear_1": (part.intermediate_size, wide), "linear_2": (size, part.intermediate_size)}
    return {
        join(root, name, last): shape if last == "weight" else shape[:1]
        for name, shape in shapes.items()
        for last in ("weight", "bias")
    }


def resampler_sources(part: Resampler, path: str) -> Shapes:
    """Return the tensors of a resampler. Those of its attention have the names of torch.nn.MultiheadAttention."""
    size, inside = part.hidden, join(path, "cross_attn")
    found: Shapes = {join(path, "query"): (max(count for _, count in part.queries), size)}
    found |= {join(inside, f"{name}_proj.weight"): (size, size) for name in "qkv"}
    found[join(inside, "multihead_attn.in_proj_weight")] = (3 * size, size)
    found[join(inside, "multihead_attn.in_proj_bias")] = (3 * size,)
    for name in ("multihead_attn.out_proj", "linear"):
        found |= {join(inside, f"{name}.weight"): (size, size), join(inside, f"{name}.bias"): (size,)}
    for name in ("layer_norm", "layer_norm_kv"):
        found |= {join(inside, f"{name}.{last}"): (size,) for last in ("weight", "bias")}
    return found


def media_sources(media: Media) -> Shapes:
    """Return every tensor that a checkpoint must have for the towers and the projectors: name and shape."""
    found: Shapes = {}
    for stored in (stored for one in media.towers for stored in media_tensors(one).values()):
        found[stored.name] = stored.shape
        if stored.scale:
            found[stored.scale] = stored.shape[:1]
        found |= {one.name: one.shape for one in stored.added}
    return found


def _tower_tensors(tower: Tower) -> Iterator[tuple[str, StoredTensor]]:
    shapes = _input_sources(tower)
    if tower.class_token:
        shapes[join(tower.root, tower.class_token)] = tower.class_shape or (tower.hidden,)
    if tower.positions is not None:
        stored = tower.positions.stored or (tower.positions.rows, tower.hidden)
        shapes[join(tower.root, tower.positions.name)] = stored
    for name in tower.standard or ():
        shapes[join(tower.root, name)] = (tower.hidden,)
    for norm in (tower.before, tower.norm):
        if norm is not None:
            shapes |= norm_sources(norm, tower.root, (norm.size,))
    scales: dict[str, str] = {}
    halved: dict[str, int] = {}
    renamed: dict[str, StoredTensor] = {}
    for index, block in enumerate(tower.blocks):
        path = block_path(tower, index)
        for branch in block:
            shapes |= branch_sources(branch, path) | bias_sources(branch, tower.root)
        renamed |= {join(path, name): placed(stored, path) for name, stored in tower.renamed}
        for name in tower.halved:
            halved[join(path, name)] = _half_head(block)
        for matrix, vector in tower.scales:
            scales |= {join(path, matrix, last): join(path, vector) for last in ("weight", "bias")}
    for name, shape in shapes.items():
        half = halved.get(name.removesuffix(".weight"), 0)
        yield name, renamed.get(name) or StoredTensor(name=name, shape=shape, scale=scales.get(name, ""), half=half)


def placed(stored: StoredTensor, path: str) -> StoredTensor:
    """Return the tensor with its full name. Its name, and the names of tensors added to it, are relative to a path."""
    added = tuple(placed(one, path) for one in stored.added)
    return replace(stored, name=join(path, stored.name), added=added)


def _half_head(block: Block) -> int:
    """Return half the size of a head of a block's attention."""
    return next(body.head_dim // 2 for part in block for body in bodies(part) if isinstance(body, Attention))


def _input_sources(tower: Tower) -> Shapes:
    patches = tower.patches
    if isinstance(patches, AudioEmbedding):
        return audio_sources(patches, tower.root)
    if isinstance(patches, ChunkedAudio):
        return chunked_sources(patches, tower.root)
    if isinstance(patches, SubsampledAudio):
        return subsampled_sources(patches, tower.root)
    if isinstance(patches, NormedAudio):
        return normed_sources(patches, tower.root)
    shapes: Shapes = {join(tower.root, patches.source, "weight"): patches.stored}
    if patches.bias:
        shapes[join(tower.root, patches.source, "bias")] = (tower.hidden,)
    return shapes | ({} if patches.norm is None else norm_sources(patches.norm, tower.root, (patches.norm.size,)))


def _block_sources(step: Blocks, root: str) -> Shapes:
    found: Shapes = {}
    for index, block in enumerate(step.blocks):
        for branch in block:
            found |= branch_sources(branch, join(root, step.layers, str(step.first + index)))
    return found


def _step_sources(step: ProjectorStep, root: str) -> Shapes:
    match step:
        case Merge() | AveragePool() | AverageRows() | JoinRows() | ClassRow() | Activate():
            return {}
        case AttentionPool():
            return pooling_head_sources(step, join(root, step.name))
        case Resampler() | QFormer() | Perceiver() | WindowMerge():
            return querying_sources(step, root)
        case Blocks():
            return _block_sources(step, root)
        case JoinTiles():
            return joined_tile_sources(step, root)
        case Project(linear=linear):
            return linear_sources(linear, root)
        case MLP():
            found: Shapes = {}
            for linear in mlp_linears(step):
                found |= linear_sources(linear, join(root, step.name))
            return found
        case norm:
            return norm_sources(norm, root, (norm.size,))
