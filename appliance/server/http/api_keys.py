"""The API key of a request."""

import hashlib
import hmac

from starlette.datastructures import Headers

from appliance.security.keys import ApiKey
from appliance.server.errors.api import Unauthorized
from appliance.server.http.service import Service


def key_of(service: Service, headers: Headers) -> ApiKey:
    """Return the API key in the headers. Raise Unauthorized without a valid one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    # Compare every key with every header in constant time, so that the duration reveals nothing about the keys.
    found = None
    for text in given:
        digest = hashlib.sha256(text.encode("latin-1")).digest()
        for known in service.keys:
            if hmac.compare_digest(digest, known.digest):
                found = known
    if found is None:
        raise Unauthorized
    return found
