"""Registry of multimodal families: a tower and projectors, and a text decoder that is declared by its own family.

A family is a module with `ARCHITECTURES` and `declare(config, hidden) -> Media`, where `config` is the whole
configuration and `hidden` the width of the text decoder. The decoder is found as in `engine.models.text_only`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from engine.models import (
    aria_media,
    blip2,
    gemma4_media,
    gemma_media,
    glm4v,
    idefics2,
    idefics3,
    internvl,
    kimi_vl,
    llama4_media,
    llava,
    llava_next,
    minicpm_v,
    mistral3,
    phi4_multimodal,
    qwen2_5_omni,
    qwen2_audio,
    qwen3_asr,
    qwen3_omni,
    qwen_vl,
    voxtral,
)
from engine.models.media import Media, Projector, media_sources, projector_tensors
from engine.models.parts import Embedding, Model, Patches, Pooler
from engine.models.sources import join
from engine.models.text_only import text_decoder
from engine.models.thinker import THINKERS

AUDIO = (*qwen2_audio.ARCHITECTURES, *qwen3_asr.ARCHITECTURES, *voxtral.ARCHITECTURES)
"""Architectures whose only media are audio clips."""
THINKER = "thinker."
"""Prefix of the tensors of the part of Qwen-Omni that reads media and replies with text."""
DeclareMedia = Callable[[Mapping[str, Any], int], Media]
FAMILIES = (
    *(gemma_media, glm4v, idefics3, internvl, kimi_vl, llama4_media, llava, llava_next, mistral3, qwen2_audio, qwen_vl),
    voxtral,
    qwen2_5_omni,
    qwen3_asr,
    qwen3_omni,
    gemma4_media,
    aria_media,
    blip2,
    phi4_multimodal,
    idefics2,
    minicpm_v,
)
ARCHITECTURES: dict[str, DeclareMedia] = {name: family.declare for family in FAMILIES for name in family.ARCHITECTURES}


def media_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture in a config.json if it is multimodal, else ""."""
    names = config.get("architectures")
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if config.get("vision_config") is None and any(name in gemma4_media.ARCHITECTURES for name in listed):
        return ""  # a checkpoint of the text model
    return next((name for name in listed if name in ARCHITECTURES), "")


def with_media(model: Model, config: Mapping[str, Any]) -> Model:
    """Return the declaration of the decoder with its tower and projectors."""
    name, embed = media_architecture(config), model.embed
    media = ARCHITECTURES[name]({**config, "architectures": [name]}, embed.hidden)
    return replace(model, embed=replace(embed, positions_last=embed.positions is not None), media=media)


def reads_audio(architecture: str, config: Mapping[str, Any]) -> bool:
    """Return whether a model has a tower for audio clips. Some models of Gemma 4 have none."""
    if architecture in gemma4_media.ARCHITECTURES:
        return isinstance(config.get("audio_config"), Mapping)
    return architecture in (*AUDIO, *THINKERS, *phi4_multimodal.ARCHITECTURES)


def with_towers(model: Model, *, images: bool, audio: bool) -> tuple[Model, tuple[Media, ...]]:
    """Return the model without the tower whose items are turned off, if it has separate ones, and that tower."""
    media = model.media
    if media is None or media.audio is None or (images and audio):
        return model, ()
    visual = replace(media, audio=None)
    kept, left_out = (visual, media.audio) if images else (media.audio, visual)
    return replace(model, media=kept), (left_out,)


def with_embeddings(model: Model, *, images: bool, audio: bool) -> tuple[Model, tuple[Media, ...]]:
    """Return the model, whose prompts may have embeddings of all of its media, without the towers of items that are
    turned off, and these towers."""
    media = model.media
    assert media is not None, "checked by the caller"

    def chosen(one: Media) -> Media:
        return replace(one, is_loaded=audio if one.modalities == ("audio",) else images)

    hearing = None if media.audio is None else chosen(media.audio)
    made = replace(chosen(replace(media, audio=None)), audio=hearing)
    towers = (replace(media, audio=None), *(() if media.audio is None else (media.audio,)))
    loaded = (made.is_loaded, *(() if hearing is None else (hearing.is_loaded,)))
    return replace(model, media=made), tuple(one for one, own in zip(towers, loaded, strict=True) if not own)


def towers_alone(model: Model, names: Collection[str]) -> Model:
    """Return the towers of a model as a model whose outputs are embeddings of media. names: tensors of the checkpoint,
    of which those of the decoder are not read."""
    media = model.media
    assert media is not None, "checked by the caller"
    wanted = media_sources(media)
    return Model(
        embed=Embedding(vocab=model.embed.vocab, hidden=media.width),
        blocks=(),
        norm=None,
        head=None,
        max_context=model.max_context,
        pooler=Pooler(task="embed", width=media.width, pool="last", whole=False),
        unread=(*model.unread, *(name for name in names if name not in wanted)),
        media=replace(media, attention="causal", positions=None),
        encoder_only=True,
    )


def placed(model: Model, names: Mapping[str, object], left_out: tuple[Media, ...] = ()) -> Model:
    """Return the model with the names of its tensors in a checkpoint, whose prefixes depend on the exporter.

    left_out: towers whose tensors are not read."""
    if not names or model.media is None:
        return model
    if any(name.startswith(THINKER) for name in names):  # a complete checkpoint, which generates speech too
        own = {name: names[name] for name in names if name.startswith(THINKER)}
        model = replace(model, unread=(*model.unread, *(name for name in names if name not in own)))
        names = own
    for tower in left_out:
        other = _placed(tower, names)
        rest = (join(other.tower.root, one) for one in other.tower.unread)
        model = replace(model, unread=(*model.unread, *media_sources(other), *rest))
    decoder, media = text_decoder(model, names), model.media
    assert media is not None, "checked at the beginning"
    return replace(decoder, unread=model.unread, media=_placed(media, names))


def _placed(media: Media, names: Mapping[str, object]) -> Media:
    tower, tiles = media.tower, media.tiles
    patches = tower.patches
    first = patches.source if isinstance(patches, Patches) else patches.convolutions[0]
    root = _prefix(names, join(first, "weight"))
    made = replace(
        media,
        tower=replace(tower, root=tower.root if root is None else root),
        projectors=tuple(_placed_projector(one, names) for one in media.projectors),
        audio=None if media.audio is None else _placed(media.audio, names),
    )
    if tiles is None:
        return made
    return replace(made, tiles=replace(tiles, newline=join(_prefix(names, tiles.newline) or "", tiles.newline)))


def _placed_projector(projector: Projector, names: Mapping[str, object]) -> Projector:
    """Find a projector by its first tensor."""
    first = next(iter(projector_tensors(projector).values())).name
    prefix = _prefix(names, first)
    return projector if prefix is None else replace(projector, root=join(prefix, projector.root))


def _prefix(names: Mapping[str, object], end: str) -> str | None:
    """Return what precedes `end` in the only name that has it, or None."""
    found = [name for name in names if name == end or name.endswith(f".{end}")]
    return found[0].removesuffix(end).rstrip(".") if len(found) == 1 else None
