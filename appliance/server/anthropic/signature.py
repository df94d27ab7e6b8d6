"""Signatures of thinking blocks.

The signature of shown thinking is its digest. Thinking that the client wants omitted is stored in its signature,
compressed, so that it returns with the conversation and the server need not store it.
"""

import base64
import hashlib
import zlib

from engine.api.errors import RequestError

_SHOWN, _KEPT = "shown.", "kept."
MAX_TEXT = 2**22  # decompression limit in characters, since a few kilobytes could expand to far more


def sign(thinking: str, *, shown: bool) -> str:
    """Return the signature. Equal thinking has equal signatures, so that replayed replies do not differ."""
    data = thinking.encode()
    if shown:
        return _SHOWN + hashlib.blake2b(data, digest_size=16).hexdigest()
    return _KEPT + base64.b64encode(zlib.compress(data, 9)).decode()


def thinking_of(signature: str, where: str) -> str:
    """Return the thinking stored in a signature, or "" for one without it, such as another service's signature.

    Raise RequestError for a signature of this server that was modified.
    """
    if not signature.startswith(_KEPT):
        return ""
    unfold = zlib.decompressobj()
    try:
        data = unfold.decompress(base64.b64decode(signature.removeprefix(_KEPT), validate=True), MAX_TEXT)
        if not unfold.eof:
            raise ValueError("truncated")
        return data.decode()
    except (ValueError, zlib.error) as error:
        message = f"{where}.signature was not created by this server. Send the block unchanged, or leave it out."
        raise RequestError(message, f"{where}.signature") from error
