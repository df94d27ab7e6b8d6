"""Limits of requests and of the service: `limits`."""

from typing import Annotated

from pydantic import Field

from appliance.config.key import GATEWAY, LIVE, LIVE_OUTPUTS, Effect, Limit, Note, declare
from appliance.config.sections.values import Bytes, Count, Seconds, Section

HostName = Annotated[str, Field(pattern=r"^(\*\.)?([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Folder = Annotated[str, Field(pattern=r"^/")]


class PerKey(Section):
    requests_per_minute: Count | None = declare(None, effect=LIVE, example=600)
    """Requests per minute of an API key; further ones get 429 with Retry-After."""
    tokens_per_minute: Count | None = declare(None, effect=LIVE, example=400000)
    """Computed prompt and reply tokens per minute of an API key; further requests get 429."""


class Media(Section):
    """Images, videos and audio in prompts, for models that accept them."""

    images: Annotated[int, Field(ge=0)] = declare(
        16,
        effect=Effect("service", memory=True),
        affects="engine.model.task.images",
        clients=Limit("more images in a request get 400"),
        example=4,
    )
    """Maximum images in one prompt. 0 turns images and videos off: the tower is not loaded."""
    videos: Annotated[int, Field(ge=0)] = declare(
        4, effect=GATEWAY, clients=Limit("more videos in a request get 400"), example=1
    )
    """Maximum videos in one prompt. 0 turns videos off."""
    audios: Annotated[int, Field(ge=0)] = declare(
        16,
        effect=Effect("service", memory=True),
        affects="engine.model.task.audio",
        clients=Limit("more audio clips in a request get 400"),
        example=4,
    )
    """Maximum audio clips in one prompt. 0 turns audio off: the tower of a model that reads audio is not loaded."""
    frames: Count = declare(
        128,
        effect=Effect("gateway", outputs="yes"),
        clients=Limit("longer videos are read with fewer frames"),
        example=32,
    )
    """Maximum frames that are read of one video. If the model's processor selects more, they are sampled down evenly;
    a list with more frames gets 400."""
    seconds: Annotated[Seconds, Field(gt=0)] = declare(
        600.0, effect=GATEWAY, clients=Limit("longer videos and audio clips get 400"), example="2m"
    )
    """Maximum duration of one video or audio clip in a prompt; longer ones get 400."""
    max_pixels: Count = declare(50_000_000, effect=GATEWAY, clients=Limit("larger images get 400"), example=12_000_000)
    """Maximum pixels of an image, or of a frame of a video, before resizing; more get 400."""
    max_bytes: Bytes = declare(20 * 2**20, effect=GATEWAY, clients=Limit("larger files get 400"), example="5MiB")
    """Maximum size of the file of an image, video or audio clip; larger ones get 400. limits.max_body also limits files
    within a request."""
    time: Annotated[Seconds, Field(gt=0)] = declare(
        10.0, effect=GATEWAY, clients=Limit("files that take longer get 400"), example="5s"
    )
    """Time limit of fetching one file, and CPU time limit of decoding and processing it; more gets 400."""
    memory: Bytes = declare(
        2**30, effect=GATEWAY, clients=Limit("files that take more memory get 400"), example="512MiB"
    )
    """Memory limit of decoding and processing one file; more gets 400."""
    cache: Bytes = declare(256 * 2**20, effect=GATEWAY, example="1GiB")
    """Size of the cache of processed images, videos and audio clips, which the gateway keeps for repeated ones."""
    hosts: tuple[HostName, ...] = declare(
        (),
        effect=GATEWAY,
        aliases={"vLLM": "allowed_media_domains"},
        clients=Note("URLs of other hosts get 400"),
        example=["images.example.com", "*.example.org"],
        strict=False,
    )
    """Hosts from which the gateway fetches URLs of media, by https; `*.` permits all subdomains. Addresses of private
    networks are never fetched. Without hosts, media have to be part of the request."""
    folders: tuple[Folder, ...] = declare(
        (),
        effect=GATEWAY,
        aliases={"vLLM": "allowed_local_media_path"},
        clients=Note("file URLs in other folders get 400"),
        example=["/srv/images"],
        strict=False,
    )
    """Absolute paths of folders whose files requests may name as file:// URLs of media."""


class Limits(Section):
    max_waiting: Annotated[int, Field(ge=0)] = declare(
        1024,
        effect=LIVE,
        aliases={"SGLang": "max_queued_requests", "synonyms": ("max_num_queued_reqs", "max_queue")},
        clients=Limit("more requests get 503 under load"),
        example=256,
    )
    """Maximum requests that wait for the engine; further ones get 503 with Retry-After."""
    max_waiting_tokens: Count | None = declare(
        None,
        effect=LIVE,
        aliases={"synonyms": "max_num_queued_tokens"},
        clients=Limit("more requests get 503 under load"),
        example=400000,
    )
    """Maximum prompt tokens of requests without a first token; further requests get 503 with Retry-After."""
    max_body: Bytes = declare(
        32 * 2**20,
        effect=LIVE,
        aliases={"TGI": "payload_limit"},
        clients=Limit("larger bodies get 413"),
        example="1MiB",
    )
    """Maximum size of a request body; larger ones get 413."""
    max_audio_file: Bytes = declare(
        25 * 2**20,
        effect=LIVE,
        clients=Limit("larger audio files get 413"),
        example="10MiB",
    )
    """Maximum size of an audio file; larger ones get 413. limits.max_body must have room for it."""
    max_audio_seconds: Annotated[Seconds, Field(gt=0)] = declare(
        3600.0,
        effect=LIVE,
        clients=Limit("longer recordings get 400"),
        example="10m",
    )
    """Maximum duration of a recording; longer ones get 400."""
    max_output_tokens: Count | None = declare(
        None,
        effect=LIVE_OUTPUTS,
        clients=Limit("longer replies are cut"),
        example=4096,
    )
    """Maximum tokens of a reply, regardless of the request."""
    max_choices: Count = declare(
        128,
        effect=LIVE,
        aliases={"TGI": "max_best_of"},
        clients=Limit("a larger n gets 400"),
        example=4,
    )
    """Maximum n of a request."""
    max_prompts: Count = declare(1024, effect=LIVE, clients=Limit("more prompts in a request get 400"), example=16)
    """Maximum prompts in one completions request."""
    max_logprobs: Annotated[int, Field(ge=-1)] = declare(
        20, effect=LIVE, clients=Limit("requests for more get 400"), examples=(5, -1)
    )
    """Maximum logprobs per token in a request; -1 permits the complete vocabulary."""
    max_stop: Count = declare(
        16,
        effect=LIVE,
        aliases={"TGI": "max_stop_sequences"},
        clients=Limit("more stop strings get 400"),
        example=4,
    )
    """Maximum stop strings in one request."""
    per_key: PerKey = PerKey()
    """Limits of API keys without their own limits in the list of keys."""
    media: Media = Media()
    """Limits of images, videos and audio in prompts."""
    grammar_size: Bytes = declare(
        256 * 2**10,
        effect=LIVE,
        clients=Limit("larger schemas and grammars get 400"),
        example="1MiB",
    )
    """Maximum size of a schema, expression or grammar of structured output or tools; larger ones get 400."""
    grammar_time: Annotated[Seconds, Field(gt=0)] = declare(
        5.0,
        effect=LIVE,
        clients=Limit("schemas and grammars that take longer to compile get 400"),
        example="2s",
    )
    """Time limit of the compilation of one; the request gets 400 beyond it."""
    grammar_memory: Bytes = declare(
        512 * 2**20,
        effect=LIVE,
        clients=Limit("schemas and grammars that take more memory to compile get 400"),
        example="256MiB",
    )
    """Memory limit of the compilation of one; the request gets 400 beyond it."""
