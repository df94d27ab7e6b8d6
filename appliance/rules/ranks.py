"""Rules about tensor parallelism: what the ranks of one model must share evenly, and what each needs.

Rows of a matrix are cut between heads, or between outputs of an MLP; inputs where the outputs before them were cut. KV
heads that are fewer than the ranks are held by several of them. A vocabulary is cut anywhere.
"""

from appliance.rules.facts import Facts
from appliance.rules.rule import Rule, View, is_compiled


def _divides(view: View) -> bool:
    ranks = view.tensor
    return all(q % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0) for q, kv in view.facts.model.heads)


def _cuts_groups(view: View) -> bool:
    """Whether some rank's inputs begin within a group that shares a scale."""
    model = view.facts.model
    inputs = [q * dim for q, _ in model.heads for dim in model.head_sizes] + list(model.inner)
    return any(size // view.tensor % group for size in inputs for group in model.groups)


def _groups_whole(view: View) -> bool:
    if view.tensor == 1 or not is_compiled(view.kernels) or not view.facts.model.held:
        return True
    return not view.facts.model.ordered and not _cuts_groups(view)


def _heads(facts: Facts) -> str:
    counts = " and ".join(f"{q} query heads, {kv} KV heads" for q, kv in facts.model.heads)
    return f"ranks share whole heads, and the model has {counts}"


RULES = (
    Rule(
        name="ranks-heads",
        keys=("tensor",),
        facts=("model.heads",),
        holds=_divides,
        text="the ranks divide the query heads, and the KV heads or a multiple of them",
        because=_heads,
    ),
    Rule(
        name="ranks-inner",
        keys=("tensor",),
        facts=("model.inner",),
        holds=lambda view: all(size % view.tensor == 0 for size in view.facts.model.inner),
        text="the ranks divide the inner size of every MLP and expert",
        because=lambda facts: f"ranks share the inner sizes of MLPs, {' and '.join(map(str, facts.model.inner))}",
    ),
    Rule(
        name="ranks-groups",
        keys=("kernels", "tensor"),
        facts=("model.groups", "model.held", "model.ordered", "model.heads", "model.head_sizes", "model.inner"),
        holds=_groups_whole,
        text="whole numbers of a checkpoint are cut along inputs between their groups alone, with act order not at all",
        because=lambda facts: (
            f"{facts.model.quantized} cannot be cut along inputs into so many ranks"
            + (": its groups lie in act order" if facts.model.ordered else ", within a group that shares a scale")
        ),
    ),
    Rule(
        name="ranks-compiled",
        keys=("kernels", "tensor"),
        holds=lambda view: view.tensor == 1 or not is_compiled(view.kernels),
        text="compiled kernels serve a model on one rank",
    ),
    Rule(
        name="ranks-gpus",
        keys=("device", "tensor"),
        facts=("machine.gpus",),
        holds=lambda view: view.device == "cpu" or view.tensor <= max(1, len(view.facts.machine.gpus)),
        text="each rank has a GPU of its own",
        because=lambda facts: f"each rank has a GPU of its own, and there are {len(facts.machine.gpus)}",
    ),
    Rule(
        name="memory",
        keys=("device", "dtype", "weights", "kernels", "kv_cache", "block_tokens", "max_context", "tensor"),
        facts=("lacks",),
        holds=lambda view: view.facts.lacks is None or not view.facts.lacks(view),
        text="weights, workspace and the cache of one request fit into the memory of each rank",
        because=lambda facts: "weights, workspace and the cache of one request do not fit into the memory of each rank",
    ),
)
