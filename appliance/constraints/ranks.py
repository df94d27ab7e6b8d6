"""Rules for tensor parallelism: dimensions that ranks must divide evenly, and the memory of each rank.

Output rows of a matrix are split between heads, or between the outputs of an MLP. Inputs are split like the outputs of
the matrix before. If there are fewer KV heads than ranks, several ranks hold a copy of the same head. The vocabulary is
split anywhere. `engine.models.ranks` implements the same division.
"""

from appliance.constraints.rule import TRITON, Facts, Rule, View, is_compiled
from engine.models.ranks import shares


def _divides(view: View) -> bool:
    ranks = view.tensor
    return all(q % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0) for q, kv in view.facts.model.heads)


def _divides_recurrent(view: View) -> bool:
    ranks = view.tensor
    return all(shares(units, what, ranks) for units, what in view.facts.model.recurrent)


def _groups_whole(view: View) -> bool:
    held = is_compiled(view.kernels) and view.facts.model.held
    return view.tensor == 1 or not held or view.tensor in view.facts.model.whole


def _blocks_whole(view: View) -> bool:
    model = view.facts.model
    return view.tensor == 1 or view.kernels != TRITON or not model.held_on_gpu or view.tensor in model.blocks


def _gpus_each(view: View) -> bool:
    return view.device == "cpu" or view.tensor == 1 or view.tensor * view.data <= len(view.facts.machine.gpus)


def _heads(facts: Facts) -> str:
    counts = " and ".join(f"{q} query heads, {kv} KV heads" for q, kv in facts.model.heads)
    return f"ranks need whole heads, and the model has {counts}"


RULES = (
    Rule(
        name="ranks-foreign",
        keys=("tensor",),
        facts=("model.foreign",),
        holds=lambda view: view.tensor == 1 or not view.facts.model.foreign,
        text="models that only transformers' own code computes are not divided among ranks",
        because=lambda facts: f"{facts.model.foreign} is computed by transformers' own code, in one process",
    ),
    Rule(
        name="ranks-heads",
        keys=("tensor",),
        facts=("model.heads",),
        holds=_divides,
        text="the number of ranks divides the query heads, and divides the KV heads or is a multiple of them",
        because=_heads,
    ),
    Rule(
        name="ranks-inner",
        keys=("tensor",),
        facts=("model.intermediate_sizes",),
        holds=lambda view: all(size % view.tensor == 0 for size in view.facts.model.intermediate_sizes),
        text="the number of ranks divides the intermediate size of every MLP and expert",
        because=lambda facts: (
            f"ranks split the intermediate sizes of MLPs, {' and '.join(map(str, facts.model.intermediate_sizes))}"
        ),
    ),
    Rule(
        name="ranks-recurrent",
        keys=("tensor",),
        facts=("model.recurrent",),
        holds=_divides_recurrent,
        text="the number of ranks divides the heads or channels of recurrent layers, and divides the groups of a "
        "Mamba-2 mixer and the key heads of a DeltaNet or is a multiple of them",
        because=lambda facts: (
            "ranks divide the recurrent layers, which have "
            f"{', '.join(f'{units} {what}' for units, what in facts.model.recurrent)}"
        ),
    ),
    Rule(
        name="ranks-vocabulary",
        keys=("tensor",),
        facts=("model.vocab",),
        holds=lambda view: view.tensor <= view.facts.model.vocab,
        text="each rank has at least one row of the vocabulary",
        because=lambda facts: f"each rank needs at least one row of the vocabulary, which has {facts.model.vocab}",
    ),
    Rule(
        name="ranks-groups",
        keys=("kernels", "tensor"),
        facts=("model.held", "model.whole"),
        holds=_groups_whole,
        text="compiled kernels split integer weights along inputs only between quantization groups, and never with "
        "act order",
        because=lambda facts: (
            f"compiled kernels multiply by the checkpoint's {facts.model.quantized}, which cannot be cut along inputs "
            "into so many ranks: within a group that shares a scale, or in act order"
        ),
    ),
    Rule(
        name="ranks-blocks",
        keys=("kernels", "tensor"),
        facts=("model.held_on_gpu", "model.blocks"),
        holds=_blocks_whole,
        text="Triton kernels split quantized weights along inputs only between groups or blocks with a scale",
        because=lambda facts: (
            f"Triton kernels multiply by the checkpoint's {facts.model.quantized}, and so many ranks would cut inputs "
            "within a group or block that shares a scale"
        ),
    ),
    Rule(
        name="ranks-gpus",
        keys=("device", "data", "tensor"),
        facts=("machine.gpus",),
        holds=_gpus_each,
        text="each rank of each engine has its own GPU",
        because=lambda facts: (
            f"each rank of each engine has its own GPU, and {len(facts.machine.gpus)} are usable here"
        ),
    ),
    Rule(
        name="memory",
        keys=(
            *("device", "dtype", "weights", "kernels", "graphs", "kv_cache", "block_tokens"),
            *("max_context", "data", "tensor"),
        ),
        facts=("lacks",),
        holds=lambda view: view.facts.lacks is None or not view.facts.lacks(view),
        text="weights, workspace and the cache of one request fit into the memory of each rank",
        because=lambda facts: "fewer ranks have too little memory for weights, workspace and the cache of one request",
    ),
)
