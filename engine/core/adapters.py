"""LoRA adapters of the scheduler: names, their versions, and the slots of the device that hold them.

A version is one state of an adapter's files. Loading an adapter again makes a new version: requests that have started
keep theirs, and all others use the new one. A version whose requests have started stays in its slot until they end.

A request whose adapter has no slot waits for one that no started request uses; the least recently used one is evicted.
If there is none, the least recently used slot is reserved: requests that have not started no longer enter it, so it is
free once the requests that use it have ended. Without this rule, the traffic of the adapters in the slots could keep
all others waiting.

Only an adapter in the host cache can be moved to a slot. `wanted` has the versions that must be read, and `ready` those
that the host cache keeps for the next step that moves them.
"""

from collections.abc import Iterable

import msgspec


class AdapterVersion(msgspec.Struct, array_like=True):
    """One state of an adapter's files."""

    name: str
    slot: int = -1
    started: int = 0  # requests that have started and not ended
    waiting: int = 0  # requests that have not started
    ready: bool = False  # in the host cache, which keeps it


class AdaptersState(msgspec.Struct):
    """The state of `Adapters`, for a recording."""

    newest: dict[str, int]  # version of each name that requests may select
    versions: dict[int, AdapterVersion]
    slots: list[int]  # version in each slot; -1: none
    used: list[int]  # time of the last use of each slot, in uses
    next: int = 0  # number of the next version
    uses: int = 0
    reserved: tuple[int, int] | None = None  # (slot, version that waits for it)
    changed: bool = False  # requests that were set aside must be considered again
    evictions: int = 0


class Adapters:
    """Adapters by name. `names` are registered at the start. Without `num_slots`, each of them has a slot from the
    start, and there are no others."""

    def __init__(self, names: Iterable[str], num_slots: int | None) -> None:
        known = tuple(names)
        self.swapped = num_slots is not None
        count = len(known) if num_slots is None else num_slots
        self.state = AdaptersState({}, {}, [-1] * count, [0] * count)
        self.wanted: dict[int, None] = {}  # versions that the worker has to read
        self.released: list[int] = []  # ready versions without open requests
        self.forgotten: list[int] = []  # versions without open requests and without a name
        for name in known:
            version = self.load(name)
            if not self.swapped:
                self._enter(version, version)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may select."""
        return tuple(self.state.newest)

    @property
    def active(self) -> int:
        """Number of slots that hold an adapter."""
        return sum(version >= 0 for version in self.state.slots)

    def version_of(self, name: str) -> int:
        """Return the version that a new request gets, or -1 for the base model."""
        return self.state.newest[name] if name else -1

    def key(self, version: int) -> tuple[bytes, ...]:
        """Return the part of a prefix cache key that depends on the adapter."""
        if version < 0:
            return ()
        return (self.state.versions[version].name.encode(), str(version).encode())

    def load(self, name: str) -> int:
        """Register a new version of an adapter, which new requests use from now on. Return its number."""
        old, version = self.state.newest.get(name), self.state.next
        self.state.next += 1
        self.state.versions[version] = AdapterVersion(name)
        self.state.newest[name] = version
        if old is not None:
            self._forget_unused(old)
        self.state.changed = True
        return version

    def unload(self, name: str) -> None:
        """Remove the name. Requests that have it are completed."""
        self._forget_unused(self.state.newest.pop(name))

    def prepared(self, version: int) -> None:
        """Note that the host cache has this version, and keeps it until a step moves it or `released` names it."""
        self.wanted.pop(version, None)
        own = self.state.versions.get(version)
        if own is None or not own.waiting or own.slot >= 0:
            self.released.append(version)
            return
        own.ready = self.state.changed = True

    def failed(self, version: int) -> None:
        """Note that a version could not be read."""
        self.wanted.pop(version, None)

    # Requests

    def add(self, version: int) -> None:
        """Count a request that waits."""
        if version >= 0:
            self.state.versions[version].waiting += 1

    def replace(self, old: int, new: int) -> None:
        """Count a waiting request for another version."""
        self.add(new)
        self._remove_waiting(old)

    def find_slot(self, version: int, *, started: bool) -> int | None:
        """Return the slot that a request may enter now, -1 for the base model, or None if it must wait."""
        if version < 0:
            return -1
        state, own = self.state, self.state.versions[version]
        kept = state.reserved
        if own.slot >= 0:
            return None if kept is not None and kept[0] == own.slot and not started else own.slot
        if not own.ready:
            self.wanted[version] = None
            return None
        free = [slot for slot, held in enumerate(state.slots) if held < 0 or not state.versions[held].started]
        if kept is not None and kept[1] != version:
            free = [slot for slot in free if slot != kept[0]]
        if free:
            return min(free, key=lambda slot: (state.slots[slot] >= 0, state.used[slot], slot))
        if kept is None:
            state.reserved = min(range(len(state.slots)), key=lambda slot: (state.used[slot], slot)), version
        return None

    def start(self, version: int, slot: int) -> bool:
        """Count a request that starts in this slot. Return whether the slot must be filled first."""
        if version < 0:
            return False
        own = self.state.versions[version]
        own.waiting -= 1
        own.started += 1
        return self.use(version, slot)

    def use(self, version: int, slot: int) -> bool:
        """Note the use of a slot by a request that is scheduled. Return whether the slot must be filled first."""
        if version < 0:
            return False
        state, own = self.state, self.state.versions[version]
        state.uses += 1
        state.used[slot] = state.uses
        if own.slot >= 0:
            return False
        self._enter(version, slot)
        own.ready = False
        return True

    def end(self, version: int, *, started: bool) -> None:
        """Count a request that ended."""
        if version < 0:
            return
        if not started:
            self._remove_waiting(version)
            return
        own = self.state.versions[version]
        own.started -= 1
        if not own.started:
            self.state.changed = True
            self._forget_unused(version)

    def _remove_waiting(self, version: int) -> None:
        own = self.state.versions[version]
        own.waiting -= 1
        self.state.changed = True
        if not own.waiting and own.ready:
            own.ready = False
            self.released.append(version)
        if not own.waiting:
            self.wanted.pop(version, None)
        self._forget_unused(version)

    def _enter(self, version: int, slot: int) -> None:
        state = self.state
        held = state.slots[slot]
        if held >= 0:
            state.versions[held].slot = -1
            state.evictions += 1
        if state.reserved is not None and version == state.reserved[1]:
            state.reserved = None
        state.slots[slot], state.versions[version].slot = version, slot

    def _forget_unused(self, version: int) -> None:
        """Drop a version that is not the newest one of its name and that no request uses."""
        state = self.state
        own = state.versions.get(version)
        if own is None or own.started or own.waiting or state.newest.get(own.name) == version:
            return
        if own.slot >= 0:
            state.slots[own.slot], state.used[own.slot] = -1, 0
        del state.versions[version]
        self.forgotten.append(version)
