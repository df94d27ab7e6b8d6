"""Application of an edited manifest to a running service: keys that take effect at once, and pending keys."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from appliance.config import live_keys
from appliance.config.effects import effect
from appliance.config.fingerprint import outputs_hash
from appliance.config.gateway import GatewayConfig
from appliance.config.key import Effect
from appliance.planning.diff.config_snapshot import ConfigSnapshot, Value
from appliance.planning.diff.diff import Change, compare
from appliance.planning.plan import Effective, Plan, resolved_values

COSTS = ("engine", "gateway", "service")


@dataclass(frozen=True)
class Step:
    """Transition from the running manifest to an edited one."""

    at_once: tuple[Change, ...]  # take effect in the running gateway
    waiting: tuple[Change, ...]  # need a restart
    silent: tuple[Change, ...]  # need no action
    gateway: GatewayConfig
    running: ConfigSnapshot  # the running side after `at_once` is applied
    swapped: tuple[Change, ...] = ()  # take effect with new engines

    @property
    def cost(self) -> str:
        restarts = {effect(change.key).restart for change in self.waiting}
        return max(restarts, key=COSTS.index, default="")

    def whole(self, wanted: ConfigSnapshot) -> "Step":
        """Return the transition after the engines are also replaced. Requires that nothing else is pending."""
        assert wanted.plan is not None and self.cost in ("", "engine"), "engines are enough"
        plan = wanted.plan
        identity = {"manifest_sha256": plan.sha256, "outputs_sha256": plan.gateway.outputs_sha256}
        gateway = msgspec.structs.replace(self.gateway, **identity)
        return replace(self, waiting=(), swapped=self.waiting, gateway=gateway, running=wanted)


def step(running: ConfigSnapshot, gateway: GatewayConfig, wanted: ConfigSnapshot) -> Step:
    """Compare the running side with the wanted one. Both must have plans.

    `gateway` is the configuration last sent to the running gateway.
    """
    assert running.plan is not None and wanted.plan is not None, "a manifest without a plan is refused"
    acting = [change for change in compare(running, wanted).changes if change.acts]
    kinds = {change.key: effect(change.key) for change in acting}
    held = _held_keys(wanted, kinds)
    at_once = tuple(change for change in acting if kinds[change.key].live and change.key not in held)
    silent = tuple(change for change in acting if kinds[change.key].restart == "none")
    waiting = tuple(change for change in acting if change not in (*at_once, *silent))
    plan = _with(running.plan, wanted.plan, {change.key for change in (*at_once, *silent)})
    whole = not waiting
    config = live_keys.mixed(
        gateway,
        _journal_of(gateway, wanted.plan.gateway),
        [_pattern(change.key) for change in at_once],
        manifest_sha256=wanted.plan.sha256 if whole else gateway.manifest_sha256,
        outputs_sha256=outputs_hash(resolved_values(plan.effective)),
    )
    values = _values(running.values, (*at_once, *silent))
    return Step(at_once, waiting, silent, config, replace(running, values=values, plan=plan))


def _held_keys(wanted: ConfigSnapshot, kinds: dict[str, Effect]) -> set[str]:
    """Return keys that stay pending because the gateway lacks the environment variable of a secret."""
    manifest = wanted.settings.manifest
    users = {
        "endpoints.api_keys": manifest.endpoints.api_keys,
        "observability.traces.headers": manifest.observability.traces.headers,
    }
    held: set[str] = set()
    for user, name in users.items():
        if name is not None and any(
            key.startswith(f"secrets.{name}.") and not kind.live for key, kind in kinds.items()
        ):
            held |= {user, f"secrets.{name}.file"}
    return held


def _pattern(key: str) -> str:
    return f"secrets.*.{key.rpartition('.')[2]}" if key.startswith("secrets.") else key


def _journal_of(now: GatewayConfig, wanted: GatewayConfig) -> GatewayConfig:
    """Keep the journal file: another folder takes effect only when the gateway restarts."""
    return msgspec.structs.replace(wanted, journal=now.journal) if now.journal and wanted.journal else wanted


def _with(now: Plan, wanted: Plan, keys: set[str]) -> Plan:
    """Return the running plan with the wanted values of these keys."""
    theirs: dict[str, Effective] = {one.key: one for one in wanted.effective}
    names = {key.rpartition(".")[0] if key.startswith("secrets.") else key for key in keys}
    kept = [theirs.get(one.key, one) if one.key in names else one for one in now.effective]
    return replace(now, effective=tuple(kept))


def _values(now: dict[str, Value], changes: Iterable[Change]) -> dict[str, Value]:
    found = dict(now)
    for change in changes:
        if change.after is None:
            found.pop(change.key)
        else:
            found[change.key] = change.after
    return found
