"""Memory of each candidate choice: for the solver's memory rule, and for the alternatives in error messages."""

from collections.abc import Iterator
from dataclasses import replace

from appliance.config.manifest import Manifest
from appliance.config.problems import Refused
from appliance.config.settings import Settings
from appliance.constraints.rule import View
from appliance.constraints.rules import RULES
from appliance.constraints.solve import Situation, solve
from appliance.constraints.variables import VARIABLES
from appliance.hardware.machine import Machine
from appliance.planning.diagnostics import SHARE, Suggestion
from appliance.planning.memory import spell_bytes
from appliance.planning.memory_budget import MemoryBudget, measure, rank_holdings
from appliance.planning.placement import place
from appliance.planning.requirements import Need, need_of, requested_capacity
from engine.lowering.footprint import Holding
from engine.models.checkpoint import Checkpoint

SHARES = 100  # memory_share is proposed in steps of 1/100


class RankBudgets:
    """Memory budgets of candidate choices on one machine.

    Results are cached, because the solver queries them often and counting weights is slow.
    """

    def __init__(self, settings: Settings, checkpoint: Checkpoint, machine: Machine) -> None:
        self._settings, self._checkpoint, self._machine = settings, checkpoint, machine
        self._holdings: dict[tuple[object, ...], tuple[tuple[Holding, ...], ...]] = {}
        self._needs: dict[tuple[object, ...], Need | None] = {}

    def budget(self, view: View, manifest: Manifest | None = None) -> MemoryBudget:
        key = (view.device, view.dtype, view.weights, view.kernels, view.tensor)
        if key not in self._holdings:
            self._holdings[key] = rank_holdings(self._checkpoint, view)
        return measure(
            manifest or self._settings.manifest,
            self._checkpoint,
            self._machine,
            replace(view),
            self._holdings[key],
            threads=self._threads(view),
        )

    def need(self, view: View) -> Need | None:
        """Return the memory requirement, or None if the machine lacks the device."""
        choice = (view.device, view.dtype, view.weights, view.kernels, view.graphs, view.kv_cache, view.block_tokens)
        key = (*choice, view.max_context, view.data, view.tensor)
        if key not in self._needs:
            self._needs[key] = self._need(view, self._settings.manifest)
        return self._needs[key]

    def lacks(self, view: View) -> str:
        """Return the missing memory of a rank as text, or "" if weights, workspace and requested cache fit."""
        need = self.need(view)
        if need is None:
            return "a GPU"
        return spell_bytes(need.lacks) if need.lacks else ""

    def share(self, view: View) -> float | None:
        """Return the smallest memory_share, in hundredths, that fits; None if no value does."""
        manifest = self._settings.manifest
        for count in range(int(manifest.hardware.memory_share * SHARES) + 1, SHARES + 1):
            hardware = manifest.hardware.model_copy(update={"memory_share": count / SHARES})
            need = self._need(view, manifest.model_copy(update={"hardware": hardware}))
            if need is not None and not need.lacks:
                return count / SHARES
        return None

    def _need(self, view: View, manifest: Manifest) -> Need | None:
        if view.device == "cuda" and not self._machine.gpus[: view.tensor * view.data]:
            return None
        return need_of(
            manifest,
            self._machine,
            self.budget(view, manifest),
            requested_capacity(manifest, view.data, view.max_context),
        )

    def _threads(self, view: View) -> int:
        try:
            return place(self._settings, self._machine, view.device, view.tensor).threads.value
        except Refused:  # reported when this choice becomes the plan
            return self._machine.cores


def suggestions(rank_budgets: RankBudgets, situation: Situation, view: View) -> Iterator[Suggestion]:
    """Yield values of single keys that would fit in memory and satisfy all other rules.

    Limits are omitted because the shortage message covers them, and the device because a CPU is about a hundred times
    slower than a GPU.
    """
    keys = next(rule.keys for rule in RULES if rule.name == "memory")
    for variable in VARIABLES:
        if variable.name not in keys or variable.limit or variable.name == "device":
            continue
        values, text = [], []
        for value in variable.values(situation.facts):
            # Other open variables are solved as in the plan, whether or not they affect memory.
            changed = solve(situation.with_values(**{variable.name: value}))
            need = None if changed is None else rank_budgets.need(changed)
            if need is not None and not need.lacks:
                values.append(variable.spelled(value))
                text.append(f"{variable.spelled(value)} (needs {spell_bytes(need.needed)})")
        if text:
            yield Suggestion(variable.key, values[0], " or ".join(text))
    share = rank_budgets.share(view)
    if share is not None:
        yield Suggestion(SHARE, f"{share:g}", f"{share:g}")
