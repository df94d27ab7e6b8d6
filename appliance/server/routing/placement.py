"""Choice of an engine by a request's header, by its session, or by load."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.observability.log import MediaLoad
from appliance.observability.spans import RequestSpan
from appliance.server.routing.engine import Engine, Request


@dataclass(frozen=True)
class Placement:
    """Placement constraint of a request: an engine index, or a session; and for its records, the span of the request,
    if it is traced, and the loading of its media.

    Without a constraint, the least loaded engine is used.
    """

    engine_index: int | None = None
    session: str = ""
    span: RequestSpan | None = field(default=None, compare=False)
    media: MediaLoad | None = field(default=None, compare=False)

    def allows(self, index: int) -> bool:
        return self.engine_index in (None, index)


ANYWHERE = Placement()


def choose(engines: Iterable[Engine[Request]], where: Placement) -> Engine[Request] | None:
    """Return an engine that satisfies the placement and can take a request now, or None."""
    free = [engine for engine in engines if engine.serves and not engine.reserved and where.allows(engine.index)]
    if not free:
        return None
    if where.session and where.engine_index is None:
        # Rendezvous hashing: when an engine is gone, only its own sessions move, and they return to it later.
        return max(free, key=lambda engine: _draw(where.session, engine.index))
    return min(free, key=lambda engine: len(engine.open))


def _draw(session: str, engine: int) -> bytes:
    """Return a pseudorandom value for a session and an engine, equal in every process."""
    return hashlib.blake2b(session.encode(), salt=engine.to_bytes(8, "big")).digest()
