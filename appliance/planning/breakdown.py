"""Memory breakdown of one rank, with the derivation of each number."""

from appliance.planning.choice import Choice
from appliance.planning.derivation import Account, Step, number, product, summed
from appliance.planning.memory import (
    LENGTHS,
    Concurrency,
    Memory,
    RankWeights,
    StateGroup,
    group_blocks,
    largest,
    state_groups,
    weight_accounts,
)
from appliance.planning.memory_budget import SELF_TEST, STATES, MemoryBudget
from appliance.planning.workspace import BUFFER
from engine.kv.layout import Layout
from engine.lowering.footprint import mapped_bytes, part_bytes


def breakdown(budget: MemoryBudget, cache: Choice[int], context: int, context_account: Account) -> Memory:
    """Return the memory breakdown of one rank. `context_account` explains the choice of the context length."""
    pages, step, model_tables = budget.pages, budget.size.tokens, budget.tables(context)
    blocks = pages.blocks(cache.value)
    used = (*budget.fixed, *model_tables, *budget.scores(context), *budget.graphs)
    states = summed(one for one in budget.fixed if one.name == STATES)
    accounts = (
        budget.usable.account,
        *weight_accounts(budget.holdings),
        Account("weights", "all parts of the weights in memory", _sums(budget)),
        Account("workspace", "process, largest step, request table and graphs", used),
        Account("loading", "peak memory while loading", _loading_steps(budget)),
        *_cache_accounts(budget, cache, blocks, context),
        context_account,
        budget.host_account,
    )
    return Memory(
        free=budget.usable.free,
        budget=budget.usable.bytes,
        weights=budget.weights,
        workspace=summed(used),
        cache=cache.value,
        block_bytes=pages.block_bytes,
        blocks=blocks,
        tokens=_longest(pages, blocks, context, step),
        whole_contexts=_at_once(budget, blocks, context),
        parts=part_bytes(budget.holdings),
        mapped=mapped_bytes(budget.holdings),
        ranks=tuple(RankWeights(part_bytes(one), mapped_bytes(one)) for one in budget.ranks),
        tables=summed(model_tables),
        buffers=summed(one for one in budget.fixed if one.name.startswith(BUFFER)),
        self_test=summed(one for one in budget.fixed if one.name == SELF_TEST),
        states=states,
        state_slots=states // max(1, budget.states.slot_bytes),
        state_slot_bytes=budget.states.slot_bytes,
        graphs=summed(budget.graphs),
        loading=budget.loading,
        state=state_groups(pages, context, step),
        concurrency=tuple(
            Concurrency(tokens, _at_once(budget, blocks, tokens)) for tokens in (*_shorter(context), context)
        ),
        host=budget.host,
        accounts=accounts,
    )


def _shorter(context: int) -> list[int]:
    return [tokens for tokens in LENGTHS if tokens < context]


def _longest(pages: Layout, blocks: int, context: int, step: int) -> int:
    if not pages.groups:
        return context
    return largest((blocks + 1) * pages.block_tokens, lambda n: pages.blocks_for(n, step) < blocks)


def _at_once(budget: MemoryBudget, blocks: int, tokens: int) -> int:
    """Return how many requests of `tokens` tokens fit into the cache. Without a cache, it is the number that may run at
    once if they have recurrent state, else the number of prompts that fit into one step."""
    if budget.states.layers and not budget.pages.groups:
        return budget.running.value
    if not budget.pages.groups:
        return max(1, min(budget.running.value, budget.size.tokens // tokens))
    return (blocks - 1) // budget.pages.blocks_for(tokens, budget.size.tokens)


def _sums(budget: MemoryBudget) -> tuple[Step, ...]:
    return tuple(Step(part, number(count), count) for part, count in part_bytes(budget.holdings).items())


def _loading_steps(budget: MemoryBudget) -> tuple[Step, ...]:
    process = Step("process", number(budget.fixed[0].value), budget.fixed[0].value)
    rest = budget.loading - int(process.value)
    return process, Step("weights loaded so far, and the largest temporary for one matrix", number(rest), rest)


def _cache_accounts(budget: MemoryBudget, cache: Choice[int], blocks: int, context: int) -> tuple[Account, ...]:
    pages, step = budget.pages, budget.size.tokens
    if not pages.groups:
        return (Account("kv", f"the KV cache: {cache.reason}", (Step("blocks", "0", 0),)),)
    what = "keys and values" if pages.planes == 2 else "latents"
    sizes = pages.planes, pages.block_tokens, pages.kv_heads, pages.vector_bytes
    page = product(f"{what} of a block in a layer", *sizes)
    page = Step(page.name, page.formula, page.value, added=False)
    own = pages.block_bytes - pages.draft_bytes
    block = [Step("block", f"{number(pages.layers_per_block)} × {number(page.value)}", own)]
    if pages.draft_bytes:
        block.append(Step("pages of the draft model for it", number(pages.draft_bytes), pages.draft_bytes))
    each = [
        product(f"{one.kind}: a token in {one.layers} layers", one.layers, pages.planes, *_vectors(pages, one))
        for one in state_groups(pages, context, step)
    ]
    needs = pages.blocks_for(context, step)
    per_group = " + ".join(map(number, _group_needs(pages, context, step)))
    used = blocks * pages.block_bytes
    held = Step("blocks of the pool", f"⌊{number(cache.value)} / {number(pages.block_bytes)}⌋", blocks, "blocks", False)
    together = Step("the pool with its null block", f"{number(blocks)} × {number(pages.block_bytes)}", used)
    one = Step("blocks of one request, by group", per_group, needs, "blocks", False)
    fit = (blocks - 1) // needs
    at_once = Step("requests", f"⌊({number(blocks)} − 1) / {number(needs)}⌋", fit, "requests", False)
    whole = f"requests of {context} tokens (full context) that fit into the cache at the same time"
    return (
        Account("block", "one block of the KV cache", (page, *block)),
        Account("state", "bytes of a token in all layers that keep it", tuple(each)),
        Account("kv", f"the KV cache: {cache.reason or 'as configured'}", (held, together, *_rest(cache.value - used))),
        Account("concurrency", whole, (one, at_once), "requests", is_sum=False),
    )


def _rest(count: int) -> tuple[Step, ...]:
    return (Step("remainder, less than one block", number(count), count),) if count else ()


def _vectors(pages: Layout, state: StateGroup) -> tuple[int, int]:
    """Return the number of KV heads of these layers, and the bytes of a key or value."""
    return state.kv_heads, state.token_bytes // (state.layers * pages.planes * state.kv_heads)


def _group_needs(pages: Layout, context: int, step: int) -> list[int]:
    return [group_blocks(pages, number, context, step) for number in range(len(pages.groups))]
