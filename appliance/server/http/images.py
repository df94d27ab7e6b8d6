"""Loading of a request's images, before its prompt is rendered."""

from collections.abc import Iterable
from dataclasses import replace

from starlette.requests import Request

from appliance.images.part import ImagePart, Images
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.pipeline import Call
from appliance.server.http.service import service_of


async def load_images(request: Request, parts: Iterable[ImagePart]) -> Images:
    """Return the processed images. Raise RequestError that names the field of an image.

    `parts` is not read for a model that accepts only text: its prompts refuse images.
    """
    loader = service_of(request).images
    found = [] if loader is None else list(parts)
    if loader is None or not found:
        return {}
    return await until_disconnect(request, loader.load(found))


async def with_images(call: Call, parts: Iterable[ImagePart]) -> Call:
    """Return the call with its images. Raise the errors of `load_images`."""
    return replace(call, context=replace(call.context, images=await load_images(call.request, parts)))
