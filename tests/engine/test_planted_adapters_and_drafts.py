"""Faults planted in LoRA adapters, drafts and their verification. A comparison of the test suite must notice each.

Each fault names the comparison that runs with it, a test of another file or one below. More faults of the scheduler are
in tests/engine/core/test_draft_plans.py and tests/engine/core/test_planted_faults.py.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core import draft_control, suffixes
from engine.core.adapters import Adapters
from engine.core.draft_control import DraftControl
from engine.core.drafting import Drafting
from engine.core.drafts import NgramIndex
from engine.layers import draft_head, lora
from engine.layers.lora import LoraEntry, LoraLayer
from engine.llm import LLM
from engine.models import adapters as declared
from engine.models import draft as drafts
from engine.models import eagle
from engine.worker import rows
from engine.worker.adapters import AdapterStore
from engine.worker.drafting import DraftModel, Passes
from tests.engine import test_adapter_slots as slots
from tests.engine import test_adapters as adapters
from tests.engine import test_draft_models as models
from tests.engine import test_eagle_heads as heads
from tests.engine import test_expert_adapters as experts
from tests.engine import test_speculation as lookup
from tests.engine.core import test_adapters as traffic
from tests.engine.core import test_draft_control, test_draft_plans, test_drafts
from tests.tiers import thinned

Plant = Callable[[pytest.MonkeyPatch], None]
path, target, base, right = lookup.path, heads.target, slots.base, slots.right  # fixtures


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def sets(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


def read_as(change: Callable[..., Any]) -> Plant:
    """Return a fault that changes A and B of a projection. change: gets the matrices, the module and its tensors."""

    def make(right: Any) -> Any:
        return lambda low_rank, path, read: change(*right(low_rank, path, read), low_rank, path, read)

    return wrap(lora, "_read_matrices", make)


def next_half(a: Any, b: Any, low_rank: Any, path: str, read: Any) -> Any:
    """Return B of the other half of gate and up."""
    own = low_rank.own
    if own is None or own.swapped:
        return a, b
    whole = read(f"{path}.b").unflatten(1, (-1, low_rank.experts))[..., own.expert]
    first = (own.first + own.outputs) % len(whole)
    return a, whole[first : first + own.outputs]


def expert_by_expert(a: Any, b: Any, low_rank: Any, path: str, read: Any) -> Any:
    """Return B as if the columns of an expert were adjacent."""
    own = low_rank.own
    if own is None:
        return a, b
    whole = read(f"{path}.b").unflatten(1, (low_rank.experts, -1))[:, own.expert]
    return a, whole[own.first : own.first + own.outputs]


def first_expert(a: Any, b: Any, low_rank: Any, path: str, read: Any) -> Any:
    return (a if low_rank.own is None else read(f"{path}.a").unflatten(0, (low_rank.experts, -1))[0]), b


def other_sources(right: Any) -> Any:
    def pieces(stack: Any, own: Any) -> Any:
        found = right(stack, own)
        count = len({source for _, _, source in found})
        return tuple((at, size, (source + 1) % count) for at, size, source in found)

    return pieces


def keeps_old_ranks(right: Any) -> Any:
    return lambda self, adapter, entry: None if entry is None else right(self, adapter, entry)


def keeps_old_b(self: LoraLayer, adapter: int, entry: LoraEntry | None) -> None:
    self.ranks[adapter] = 0 if entry is None else entry.ranks
    if entry is not None:
        self.a[adapter] = entry.a


def rows_without_adapters_get_the_first(right: Any) -> Any:
    return lambda self, x, adapters: right(self, x, adapters.clamp(min=0))


def any_slot(right: Any) -> Any:
    """Return a slot whose adapter is in use as if it was free."""

    def find(self: Adapters, version: int, *, started: bool) -> int | None:
        found = right(self, version, started=started)
        if found is None and version >= 0 and self.state.versions[version].ready:
            return 0
        return found

    return find


def never_reserved(right: Any) -> Any:
    def find(self: Adapters, version: int, *, started: bool) -> int | None:
        found = right(self, version, started=started)
        self.state.reserved = None
        return found

    return find


def accepts_one_more(right: Any) -> Any:
    return lambda sampled, start, draft: min(1 + len(draft), right(sampled, start, draft) + 1)


def accepts_one_less(right: Any) -> Any:
    return lambda sampled, start, draft: max(1, right(sampled, start, draft) - 1)


def noise_of_the_next_position(right: Any) -> Any:
    def draft(self: Passes, hidden: Any, drawn: Any) -> Any:
        moved = [replace(row, end=row.end + 1) for row in drawn]
        made = right(self, hidden, moved)
        for row, new in zip(drawn, made, strict=True):
            if new is not None:
                token = self._table.tokens[row.slot, row.end + 1 + self._ahead]
                self._table.tokens[row.slot, row.end + self._ahead] = token
        return [None if one is None else replace(one, first=one.first - 1, end=one.end - 1) for one in made]

    return draft


def trusts_drafts(self: DraftModel, row: Any, end: int) -> int:
    """Return the first position that is not computed, as if all drafts had been accepted."""
    position = self._computed.get(row.slot, row.first) + len(self._tentative.pop(row.slot, ()))
    return min(position, end)


def states_of_the_token_before(right: Any) -> Any:
    return lambda self, states: right(self, states.roll(1, 0))


def in_order_of_the_head(right: Any) -> Any:
    def load(self: Any, read: Any, target: Any) -> None:
        right(self, read, target)
        if self.ids is not None:
            self.ids = torch.arange(len(self.ids))

    return load


def layers_before(right: Any) -> Any:
    return lambda *given: tuple(max(0, layer - 1) for layer in right(*given))


def with_input(**values: Any) -> Any:
    """Return a change of the input of an EAGLE-3 head."""

    def make(right: Any) -> Any:
        def declare(*given: Any) -> Any:
            model = right(*given)
            own = {key: new(model.prediction_input) for key, new in values.items()}
            return replace(model, prediction_input=replace(model.prediction_input, **own))

        return declare

    return make


def one_token_later(right: Any) -> Any:
    def matches(self: NgramIndex, ids: list[int], text: list[int], count: int) -> Iterator[tuple[int, int]]:
        return ((length, min(end + 1, len(text) - 1)) for length, end in right(self, ids, text, count))

    return matches


def replies_by_salt(patch: pytest.MonkeyPatch) -> None:
    """Keep recent replies of all adapters together."""
    for name in ("add", "text"):
        wrap(suffixes.RecentReplies, name, lambda right: lambda self, scope, *rest: right(self, (scope[0], -1), *rest))(
            patch
        )


def without_alpha_patterns(right: Any) -> Any:
    return lambda config, key, pattern, *rest: right(
        config if key == "r" else {**config, pattern: {}}, key, pattern, *rest
    )


# Comparisons. Each gets the fixtures that it needs by name, and a folder.


def merged_weights(folder: Path) -> None:
    adapters.test_rank_pattern_alpha_pattern_and_rslora_give_each_module_its_own_scale("torch", folder)


def fused_weights(folder: Path) -> None:
    adapters.test_rows_of_a_batch_equal_models_with_merged_weights("llama", "torch", folder)


def swapped_slots(base: Any, right: Any) -> None:
    slots.test_torch_kernels_swap_adapters(base, right)


def replaced_adapter(base: Any, right: Any, folder: Path) -> None:
    with LLM(base.folder, **slots.ENGINE, kernels="torch", adapters=base.adapters) as llm:
        slots.test_a_replaced_adapter_is_used_by_new_requests_and_cached_blocks_are_not(llm, base, right, folder)


def host_cache(base: Any) -> None:
    slots.test_the_host_cache_keeps_the_latest_adapters_up_to_its_size(base)


def stacked_experts(folder: Path) -> None:
    experts.test_stacked_experts_equal_merged_weights("qwen3", "torch", folder)


def random_traffic() -> None:
    traffic.test_random_traffic_with_more_adapters_than_slots_ends_and_is_right("fcfs", 60)


def constant_traffic() -> None:
    traffic.test_constant_traffic_of_the_adapters_in_slots_does_not_keep_others_waiting()


def verified(path: Path) -> None:
    """Sampled replies with lookup drafts are those without."""
    with lookup.engine(path, "off") as plain, lookup.engine(path, "ngram") as ngram:
        lookup.test_replies_with_ngram_drafts_are_those_without("sampled", plain, ngram)


def accepted_whole(path: Path) -> None:
    """Each step of a perfect draft has all of its tokens, also if a draft follows another one."""
    for name in ("greedy", "sampled"):
        with models.engine(path, None) as plain, models.engine(path, path) as perfect:
            models.test_a_perfect_draft_is_accepted_whole(name, plain, perfect)


def drafts_of_a_model(path: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    other = models.saved(folder / "other", path, **sizes)
    with models.engine(path, None) as plain:
        models.test_drafts_are_the_most_likely_tokens_of_the_draft_model(path, other, plain, patch)


def drafts_of_a_head(target: Path, folder: Path, patch: pytest.MonkeyPatch, kind: str = "eagle3") -> None:
    reference = heads.HEADS_OF[kind](target)
    head = "eagle3", reference.save(folder / kind), reference
    heads.test_drafts_are_those_of_the_reference("torch", target, head, patch)


def searched() -> None:
    test_drafts.test_drafts_are_those_of_a_search(2, 2)


def scopes() -> None:
    test_draft_plans.test_drafts_come_from_replies_of_the_same_salt_and_adapter_only(True)


def paying() -> None:
    test_draft_control.test_break_even_is_the_cost_of_a_draft_token_relative_to_a_token(3, 0.02, 0.004)


def paying_requests() -> None:
    test_draft_control.test_a_request_whose_drafts_do_not_pay_pauses_and_tries_again()


def adaptive() -> None:
    test_draft_plans.test_rejected_drafts_lower_the_acceptance_of_a_request()


Check = Callable[..., None]
FAULTS: dict[str, tuple[Plant, Check]] = {
    "scale of an adapter omitted": (read_as(lambda a, b, one, *_: (a, b / one.scale)), fused_weights),
    "rows of A in another order": (read_as(lambda a, b, *_: (a.roll(1, 0), b)), fused_weights),
    "B reads the products of another projection": (wrap(lora, "_pieces", other_sources), fused_weights),
    "rows without an adapter get the first one": (
        wrap(LoraLayer, "delta", rows_without_adapters_get_the_first),
        fused_weights,
    ),
    "rsLoRA divides by the rank": (
        sets(declared, "math", SimpleNamespace(sqrt=lambda rank: rank, isfinite=math.isfinite)),
        merged_weights,
    ),
    "patterns of alpha match nothing": (wrap(declared, "_number", without_alpha_patterns), merged_weights),
    "B of up instead of gate": (read_as(next_half), stacked_experts),
    "B of experts in adjacent columns": (read_as(expert_by_expert), stacked_experts),
    "A of the first expert for all": (read_as(first_expert), stacked_experts),
    "a slot keeps the projections of the last adapter": (wrap(LoraLayer, "fill", keeps_old_ranks), swapped_slots),
    "a slot keeps B of the last adapter": (sets(LoraLayer, "fill", keeps_old_b), swapped_slots),
    "prefix cache without the version": (
        sets(Adapters, "key", lambda self, version: () if version < 0 else (b"",)),
        replaced_adapter,
    ),
    "the host cache has no limit": (
        sets(AdapterStore, "_insert", lambda self, version, entries: self._cache.update({version: entries})),
        host_cache,
    ),
    "unloaded adapters stay in the host cache": (
        sets(AdapterStore, "forget", lambda self, version: None),
        host_cache,
    ),
    "a slot in use is filled": (wrap(Adapters, "find_slot", any_slot), random_traffic),
    "no slot is reserved": (wrap(Adapters, "find_slot", never_reserved), constant_traffic),
    "a rejected draft token is accepted": (wrap(rows, "_num_tokens", accepts_one_more), verified),
    "the last accepted token is dropped": (wrap(rows, "_num_tokens", accepts_one_less), accepted_whole),
    "drafts with the noise of the next position": (wrap(Passes, "draft", noise_of_the_next_position), accepted_whole),
    "keys of rejected drafts are used": (sets(DraftModel, "_confirmed", trusts_drafts), drafts_of_a_model),
    "a head reads the states of the token before": (
        wrap(Passes, "head_states", states_of_the_token_before),
        drafts_of_a_head,
    ),
    "logits of a head in the order of its rows": (
        wrap(draft_head.DraftHead, "load", in_order_of_the_head),
        drafts_of_a_head,
    ),
    "a head reads the outputs of the layers before": (wrap(drafts, "kept_layers", layers_before), drafts_of_a_head),
    "a head reads its normed states": (sets(Passes, "own_states", property(lambda self: None)), drafts_of_a_head),
    "the residual of a head is normed": (
        wrap(eagle, "_eagle3", with_input(norm_before_residual=lambda part: not part.norm_before_residual)),
        drafts_of_a_head,
    ),
    "norms of a head exchanged": (
        wrap(
            eagle,
            "_eagle3",
            with_input(token_norm=lambda part: part.state_norm, state_norm=lambda part: part.token_norm),
        ),
        drafts_of_a_head,
    ),
    "a lookup draft begins one token later": (wrap(NgramIndex, "matches", one_token_later), searched),
    "replies of another adapter are drafts": (replies_by_salt, scopes),
    "drafts cost the time of one row": (
        wrap(DraftControl, "break_even", lambda right: lambda self, rows: right(self, rows) / rows),
        paying,
    ),
    "a pause is not longer each time": (sets(draft_control, "LAST_PAUSE", draft_control.FIRST_PAUSE), paying_requests),
    "rejected drafts do not count": (
        wrap(Drafting, "verified", lambda right: lambda self, sequence, drafted, accepted, **more: None),
        adaptive,
    ),
}
IN_MAKE_TEST = (
    "scale of an adapter omitted",
    "a slot keeps the projections of the last adapter",
    "a slot in use is filled",
    "the last accepted token is dropped",
    "a head reads its normed states",
)


def run(check: Check, request: pytest.FixtureRequest, plant: Plant | None = None) -> None:
    """Plant a fault and run a comparison with the fixtures that its parameters name."""
    patch = request.getfixturevalue("monkeypatch")
    own = {"folder": request.getfixturevalue("tmp_path"), "patch": patch}
    names = [name for name, one in inspect.signature(check).parameters.items() if one.default is one.empty]
    given = {name: own[name] if name in own else request.getfixturevalue(name) for name in names}
    if plant is not None:
        plant(patch)
    check(**given)


@pytest.mark.parametrize("name", thinned(FAULTS, IN_MAKE_TEST))
def test_a_planted_fault_is_noticed(name: str, request: pytest.FixtureRequest) -> None:
    plant, check = FAULTS[name]
    with pytest.raises(AssertionError):
        run(check, request, plant)


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in FAULTS.values()), ids=lambda one: one.__name__)
@pytest.mark.nightly("tests/engine/test_adapters.py::test_rows_of_a_batch_equal_models_with_merged_weights")
def test_comparisons_pass_without_a_fault(check: Check, request: pytest.FixtureRequest) -> None:
    run(check, request)
