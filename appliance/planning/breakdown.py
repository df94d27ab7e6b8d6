"""Memory breakdown of one rank, with the derivation of each number."""

from appliance.planning.choice import Choice
from appliance.planning.derivation import Account, Step, number, product, summed
from appliance.planning.memory import (
    LENGTHS,
    Concurrency,
    Memory,
    RankWeights,
    group_blocks,
    largest,
    state_groups,
    weight_accounts,
)
from appliance.planning.memory_budget import SELF_TEST, Room
from appliance.planning.workspace import BUFFER
from engine.kv.layout import Layout
from engine.models.footprint import mapped_bytes, part_bytes


def balance(room: Room, cache: Choice[int], context: int, context_account: Account) -> Memory:
    """Return the memory breakdown of one rank. `context_account` explains the choice of the context length."""
    pages, step, model_tables = room.pages, room.size.tokens, room.tables(context)
    blocks = pages.blocks(cache.value)
    used = (*room.fixed, *model_tables, *room.scores(context), *room.graphs)
    accounts = (
        room.budget.account,
        *weight_accounts(room.holdings),
        Account("weights", "all parts of the weights that are held in memory", _sums(room)),
        Account("workspace", "the process, the largest step, the request table and graphs", used),
        Account("loading", "the most that loading takes at once", _loading_steps(room)),
        *_cache_accounts(room, cache, blocks, context),
        context_account,
        room.host_account,
    )
    return Memory(
        free=room.budget.free,
        budget=room.budget.bytes,
        weights=room.weights,
        workspace=summed(used),
        cache=cache.value,
        block_bytes=pages.block_bytes,
        blocks=blocks,
        tokens=_longest(pages, blocks, context, step),
        whole_contexts=_at_once(room, blocks, context),
        parts=part_bytes(room.holdings),
        mapped=mapped_bytes(room.holdings),
        ranks=tuple(RankWeights(part_bytes(one), mapped_bytes(one)) for one in room.ranks),
        tables=summed(model_tables),
        buffers=summed(one for one in room.fixed if one.name.startswith(BUFFER)),
        self_test=summed(one for one in room.fixed if one.name == SELF_TEST),
        graphs=summed(room.graphs),
        loading=room.loading,
        state=state_groups(pages, context, step),
        concurrency=tuple(
            Concurrency(tokens, _at_once(room, blocks, tokens)) for tokens in (*_shorter(context), context)
        ),
        host=room.host,
        accounts=accounts,
    )


def _shorter(context: int) -> list[int]:
    return [tokens for tokens in LENGTHS if tokens < context]


def _longest(pages: Layout, blocks: int, context: int, step: int) -> int:
    if not pages.groups:
        return context
    return largest((blocks + 1) * pages.block_tokens, lambda n: pages.blocks_for(n, step) < blocks)


def _at_once(room: Room, blocks: int, tokens: int) -> int:
    """Return how many requests of `tokens` tokens fit into the cache, or into one step if there is no cache."""
    if not room.pages.groups:
        return max(1, min(room.running.value, room.size.tokens // tokens))
    return (blocks - 1) // room.pages.blocks_for(tokens, room.size.tokens)


def _sums(room: Room) -> tuple[Step, ...]:
    return tuple(Step(part, number(count), count) for part, count in part_bytes(room.holdings).items())


def _loading_steps(room: Room) -> tuple[Step, ...]:
    process = Step("process", number(room.fixed[0].value), room.fixed[0].value)
    rest = room.loading - int(process.value)
    return process, Step("weights made so far, and the matrix that takes most to make", number(rest), rest)


def _cache_accounts(room: Room, cache: Choice[int], blocks: int, context: int) -> tuple[Account, ...]:
    pages, step = room.pages, room.size.tokens
    if not pages.groups:
        return (Account("kv", f"the KV cache: {cache.reason}", (Step("blocks", "0", 0),)),)
    page = product("keys and values of a block in a layer", 2, pages.block_tokens, pages.kv_heads, _vector(pages))
    page = Step(page.name, page.formula, page.value, added=False)
    block = Step("block", f"{number(pages.layers_per_block)} × {number(page.value)}", pages.block_bytes)
    each = [
        product(f"{one.kind}: a token in {one.layers} layers", one.layers, 2, pages.kv_heads, _vector(pages))
        for one in state_groups(pages, context, step)
    ]
    needs = pages.blocks_for(context, step)
    per_group = " + ".join(map(number, _group_needs(pages, context, step)))
    used = blocks * pages.block_bytes
    held = Step("blocks of the pool", f"⌊{number(cache.value)} / {number(pages.block_bytes)}⌋", blocks, "blocks", False)
    together = Step("the pool, its null block included", f"{number(blocks)} × {number(pages.block_bytes)}", used)
    one = Step("blocks of one request, by group", per_group, needs, "blocks", False)
    fit = (blocks - 1) // needs
    at_once = Step("requests", f"⌊({number(blocks)} − 1) / {number(needs)}⌋", fit, "requests", False)
    whole = f"requests of {context} tokens, the whole context, that the cache holds at once"
    return (
        Account("block", "one block of the KV cache", (page, block)),
        Account("state", "what a token keeps in all layers that reach it", tuple(each)),
        Account("kv", f"the KV cache: {cache.reason or 'as asked'}", (held, together, *_rest(cache.value - used))),
        Account("concurrency", whole, (one, at_once), "requests", is_sum=False),
    )


def _rest(count: int) -> tuple[Step, ...]:
    return (Step("less than a block, left over", number(count), count),) if count else ()


def _vector(pages: Layout) -> int:
    """Return the bytes of the key or the value of one head."""
    return pages.head_dim * pages.element_bytes + pages.scale_bytes


def _group_needs(pages: Layout, context: int, step: int) -> list[int]:
    return [group_blocks(pages, number, context, step) for number in range(len(pages.groups))]
