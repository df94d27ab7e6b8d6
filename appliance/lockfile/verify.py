"""Verification of a lock file by `serve`, `check` and `plan`.

Verification refuses a checkpoint before any of its files is read, and reports other differences from the lock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from appliance.checkpoints.facts import NotDownloaded
from appliance.checkpoints.lockfile import Difference, Lock, drift, lock_path
from appliance.config.settings import Settings
from appliance.lockfile.write import derived_values, differences, planned_values, refusal, required_lock
from appliance.planning.plan import Plan

MAX_NOTES = 6  # most lines about differences from the locked plan


@dataclass
class LockVerifier:
    """Lock verification, passed to `validate`.

    `validate` calls it with the settings and the checkpoint folder, or with None while files are missing locally.
    """

    hash_contents: bool
    """True: hash every byte, as before a start, so all files must be local; False: compare sizes and cached digests."""
    strict: bool = False  # True: require a lock and refuse any difference, whatever model.lock says
    lock: Lock | None = None
    path: Path = Path()
    is_local: bool = True
    skipped: list[str] = field(default_factory=list)
    differing: list[Difference] = field(default_factory=list)

    def __call__(self, settings: Settings, folder: Path | None) -> None:
        mode = "require" if self.strict else settings.manifest.model.lock
        self.lock, self.path = required_lock(settings, mode), lock_path(settings.path)
        self.is_local = folder is not None
        if folder is None:
            # Code that comes with the checkpoint must not run before it is verified, either.
            if self.lock is not None and (self.hash_contents or settings.manifest.model.trust_remote_code):
                raise NotDownloaded(f"{self.path} requires the files, and some are not downloaded; run `slipway fetch`")
            return
        if self.lock is None or not folder.exists():
            return
        found, self.skipped = differences(settings, self.lock, folder, hash_contents=self.hash_contents)
        if found and mode != "warn":
            raise refusal(settings, found)
        self.differing = found

    def summary(self) -> str:
        """Return one line for the operator; "" without a lock."""
        if self.lock is None:
            return ""
        count = len(self.lock.model.files)
        if not self.is_local:
            return f"{self.path}: {count} file{'s' * (count != 1)}, verified once they are downloaded"
        if self.differing:
            return f"{self.path}: {len(self.differing)} of {count} files differ from the lock, and model.lock is warn"
        files = f"{count} file{'s' * (count != 1)}"
        if not self.skipped:
            known = "" if self.hash_contents else " (cached digests; sizes and times are unchanged)"
            return f"{self.path}: {files} match the lock{known}"
        unread = "contents were" if len(self.skipped) == count else f"contents of {len(self.skipped)} were"
        done = f"{files} with the locked names and sizes"
        return f"{self.path}: {done}; {unread} not compared (`slipway lock --check` compares them)"

    def notes(self, plan: Plan) -> Iterator[str]:
        """Yield differences that do not refuse the start.

        These are changed files if model.lock is warn, and changes of the plan: resolved `auto` values, or every key if
        `strict`.
        """
        if self.lock is None:
            return
        for one in self.differing:
            yield f"warning: {self.path}: {one.name}: {one.message}"
        drifted = list(drift(self.lock.plan, planned_values(plan) if self.strict else derived_values(plan)))
        most = len(drifted) if self.strict else MAX_NOTES
        if drifted:
            other = ", for another manifest" if plan.sha256 != self.lock.manifest else ""
            yield f"note: {self.path}: the plan differs from the locked plan (on {self.lock.machine}{other}):"
        yield from (f"  {line}" for line in drifted[:most])
        if len(drifted) > most:
            yield f"  and {len(drifted) - most} more; `slipway lock --check` lists them"
