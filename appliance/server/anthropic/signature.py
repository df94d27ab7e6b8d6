"""Signatures of thinking blocks: of shown thinking its digest; of thinking that the client wants left out the thinking
itself, compressed, so that it comes back with the conversation though the server keeps nothing."""

import base64
import hashlib
import zlib

from engine.api.errors import RequestError

_SHOWN, _KEPT = "shown.", "kept."
MAX_TEXT = 2**22  # characters that a signature of a few kilobytes may not unfold beyond


def sign(thinking: str, *, shown: bool) -> str:
    """The same for the same thinking: replies that are sent again do not differ."""
    data = thinking.encode()
    if shown:
        return _SHOWN + hashlib.blake2b(data, digest_size=16).hexdigest()
    return _KEPT + base64.b64encode(zlib.compress(data, 9)).decode()


def thinking_of(signature: str, where: str) -> str:
    """The thinking that a signature keeps; empty for one that keeps none, as those of other services. Raises
    RequestError for one of ours that was changed."""
    if not signature.startswith(_KEPT):
        return ""
    unfold = zlib.decompressobj()
    try:
        data = unfold.decompress(base64.b64decode(signature.removeprefix(_KEPT), validate=True), MAX_TEXT)
        if not unfold.eof:
            raise ValueError("it does not end")
        return data.decode()
    except (ValueError, zlib.error) as error:
        message = f"{where}.signature is none of this server; send the block as it was received, or leave it out."
        raise RequestError(message, f"{where}.signature") from error
