"""Tokenizer, chat template and output format, loaded once at startup."""

from appliance.chat_templates.renderers import Renderers
from appliance.chat_templates.template import ChatTemplate, load_template
from appliance.config.gateway import GatewayConfig
from appliance.server.chat.conversation import Text
from appliance.server.chat.media import MediaText, media_text
from engine.text import Tokenizer

__all__ = ["Text", "load_text"]


def load_text(config: GatewayConfig) -> Text:
    """Load the checkpoint's text files and precompute what the first request would otherwise wait for.

    Raise CheckpointError that names a missing or damaged file.
    """
    tokenizer = Tokenizer(config.model)
    renderers = Renderers()
    template = load_template(tokenizer, config.chat_template, renderers)
    reads_media = config.modalities or config.embedded_modalities
    media = _media_text(config, tokenizer, template) if reads_media else None
    text = Text(tokenizer, template, config.format, config.model_type, renderers, media)
    # Cached properties: computing them here prevents a large vocabulary from delaying the first reply.
    _ = tokenizer.vocabulary, tokenizer.special_ids, tokenizer.longest_piece, text.output_format
    return text


def _media_text(config: GatewayConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> MediaText:
    from engine.media.families import read_processors  # imports numpy and Pillow

    tokens = read_processors(config.model).tokens
    kinds = {*config.modalities, *config.embedded_modalities}
    return media_text({kind: one for kind, one in tokens.items() if kind in kinds}, tokenizer, template)
