"""Contents of requests that crashed engines. They are rejected for a limited time."""

import hashlib
from collections import OrderedDict

import msgspec

from engine.api.messages import Submit

REFUSED_S = 3600.0
MOST = 1024
"""Maximum number of remembered contents. The oldest are dropped first."""


class RefusedContents:
    """Rejected contents with their expiry. All times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, submit: Submit, now: float) -> None:
        content = content_hash(submit)
        self._until.pop(content, None)
        self._until[content] = now + REFUSED_S
        while len(self._until) > MOST:
            self._until.popitem(last=False)

    def seconds_left(self, submit: Submit, now: float) -> float:
        """Return how long a request with this content is still rejected, or 0.0 if it is not."""
        if not self._until:
            return 0.0
        return max(0.0, self._until.get(content_hash(submit), now) - now)


def content_hash(submit: Submit) -> str:
    """Return the SHA-256 of a request's content, ignoring its sender and its seed."""
    sampling = msgspec.structs.replace(submit.sampling, seed=0)
    content = (
        submit.prompt,
        submit.source,
        sampling,
        submit.max_tokens,
        submit.grammar,
        submit.stop_token_ids,
        submit.ignore_eos,
        submit.pooling,
        submit.segments,
        tuple(item.digest for item in submit.media),
    )
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()
