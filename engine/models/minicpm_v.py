"""MiniCPM-V 4.6 and MiniCPM-OCR: a tower like SigLIP's for images of any size and their slices. Squares of patches are
merged between two blocks and again after the last one.

Source: transformers modeling_minicpmv4_6.py, modeling_minicpm_ocr.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.llava import whole
from engine.models.media import Blocks, Media, Merge, Patches, Project, Projector, ProjectorStep, WindowMerge
from engine.models.parts import LayerNorm, Norm, named
from engine.models.sources import join
from engine.models.towers import SIGLIP, siglip_tower, vision_config

_OCR = "MiniCPMOcrForConditionalGeneration"
ARCHITECTURES = ("MiniCPMV4_6ForConditionalGeneration", _OCR)

_VISION = {"window_kernel_size": [2, 2]}
_DEFAULTS: dict[str, Any] = {"insert_layer_id": 6, "merge_kernel_size": [2, 2], "merger_times": 1}
TOWER, SIDE, MAX_MERGES = "vision_tower", 2, 8


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, eyes = Config.of(config, **_DEFAULTS), vision_config(config, **SIGLIP, **_VISION)
    mode = config.get("downsample_mode") or ("4x" if config["architectures"][0] == _OCR else "16x")
    for key, value in (
        ("window_kernel_size", eyes.values["window_kernel_size"]),
        ("merge_kernel_size", c.values["merge_kernel_size"]),
    ):
        if not isinstance(value, list | tuple) or tuple(value) != (SIDE, SIDE):
            raise CheckpointError(f"config.json: {key} is {shown(value)}; supported is [2, 2]")
    if mode not in ("4x", "16x"):
        raise CheckpointError(f"config.json: downsample_mode is {shown(mode)}; it must be 4x or 16x")
    tower = siglip_tower(config, None)
    norm = tower.norm
    assert tower.positions is not None and norm is not None, "SigLIP has positions and a norm"
    tower = replace(tower, positions=replace(tower.positions, fit="nearest", quotients=True))
    assert isinstance(tower.patches, Patches), "SigLIP reads images"
    patches = replace(tower.patches, flat=True, strip=True)
    steps: tuple[ProjectorStep, ...] = ()
    inserted, layers = c.whole("insert_layer_id", least=-1), len(tower.blocks)
    if mode == "16x" and not 0 <= inserted < layers:
        raise CheckpointError(f"config.json: insert_layer_id is {inserted}; it must be 0 to {layers - 1}")
    if mode == "16x":
        first = inserted + 1
        window = WindowMerge(
            hidden=tower.hidden,
            heads=eyes.heads,
            intermediate_size=SIDE**2 * eyes.intermediate_size,
            eps=norm.eps,
            side=SIDE,
            name=join(TOWER, "vit_merger"),
        )
        rest = Blocks(
            hidden=tower.hidden,
            blocks=tower.blocks[first:],
            layers=join(TOWER, tower.layers),
            first=first,
        )
        steps = (window, *((rest,) if rest.blocks else ()), named(norm, join(TOWER, norm.name)))
        tower = replace(tower, blocks=tower.blocks[:first], taken=(first,), norm=None)
    else:
        tower = replace(tower, unread=(*tower.unread, "vit_merger."))
    times = c.whole("merger_times", most=MAX_MERGES)
    for number in range(times):
        steps += _merged(number, tower.hidden, hidden if number == times - 1 else tower.hidden)
    token, video = config.get("image_token_id"), config.get("video_token_id")
    return Media(
        tower=replace(tower, root=TOWER, patches=patches),
        projectors=(Projector(steps=steps),),
        hidden=hidden,
        token=token if isinstance(token, int) else 0,
        video_token=video if isinstance(video, int) and config["architectures"][0] != _OCR else None,
    )


def _merged(number: int, width: int, outputs: int) -> tuple[Merge | Norm | Project, ...]:
    """Return the steps of a merge of squares of patches."""
    wide, path = width * SIDE**2, f"merger.mlp.{number}"
    return (
        Merge(side=SIDE),
        LayerNorm(size=wide, eps=1e-6, name=join(path, "pre_norm")),
        Project(linear=whole(join(path, "linear_1"), wide, wide), act="gelu"),
        Project(linear=whole(join(path, "linear_2"), wide, outputs)),
    )
