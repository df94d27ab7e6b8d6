"""Compiled mixtures of experts against a loop over rows in float64, in every variant that this CPU runs and for every
form of weights: routing, the linears over pairs of a row and an expert, and a row that is the same in any company."""

import math

import pytest
import torch

from kernels.cpu import program
from kernels.cpu.library import BF16_VARIANTS, usable
from kernels.cpu.packing import form_for, pack
from kernels.cpu.program import ACTS, SCORES, Activate, Cap, Combine, Program, Route, StepData, Team
from kernels.experts.routes import Routing, route
from kernels.quantisation import activation_block, outlier_ratio, rounded_rows, to_int4, to_int8

POISON = 12345.0
FULL = ("tiles_f32", "tiles_bf16", "amx_bf16", "pairs_bf16")
ROUNDED = ("tiles_int8", "tiles_int4")
PAIRS = [
    (variant, form)
    for variant in usable()
    for form in (*FULL, *ROUNDED)
    if variant in {"amx_bf16": ("amx",), "pairs_bf16": BF16_VARIANTS}.get(form, (variant,))
]


@pytest.fixture(scope="module", params=usable())
def team(request):
    made = Team(request.param, 2)
    yield made
    made.close()


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(got, want, tolerance=1e-5):
    """Relative to the largest number that is wanted."""
    scale = want.double().abs().max().clamp(min=1e-30)
    assert (got.double() - want.double()).abs().max() / scale < tolerance


def made_in(team, form, weight):
    """The weight as this form holds it, packed and restored."""
    if form in FULL:
        return pack(weight, team.tiling, form), weight.double()
    rounded = to_int4(weight.float(), 32) if "int4" in form else to_int8(weight.float(), 64)
    packed = pack(rounded, team.tiling, form)
    assert packed.form == form
    return packed, rounded.restored().double()


def product(form, x, weight):
    """x: [inputs] float32, as a row is multiplied: rounded to bf16 in pairs, to 8 bits where the weights are."""
    if form == "pairs_bf16":
        return weight @ x.bfloat16().double()
    if form in FULL:
        return weight @ x.double()
    group, bits = (32, 4) if "int4" in form else (64, 8)
    values, scales, outliers = rounded_rows(x[None], activation_block(group), outlier_ratio(bits))
    return weight @ (values[0].double() * scales[0].double() + outliers[0].double())


def chosen_by(logits, k, scores):
    """Numbers and weights of a row's experts, best first, the lowest number first among equals."""
    numbers = sorted(range(len(logits)), key=lambda e: (-logits[e].item(), e))[:k]
    among = numbers if scores == "softmax_chosen" else range(len(logits))
    total = sum(math.exp(logits[e].item()) for e in among)
    return numbers, [math.exp(logits[e].item()) / total for e in numbers]


class Run:
    """Buffers of a step and the operations on them. Result buffers are larger than needed and filled with poison."""

    def __init__(self, team, logits, k, scores="softmax", correction=None, **more):
        """correction: [experts] fp32; more: further fields of Route."""
        self.team, self.k, self.tokens, self.logits = team, k, len(logits), logits
        self.chosen = torch.full((self.tokens + 1, k), -7, dtype=torch.int32)
        self.weights = torch.full((self.tokens + 1, k), POISON)
        wide = torch.full((self.tokens, logits.shape[1] + 2), math.nan)
        wide[:, : logits.shape[1]] = logits
        self.holds = [wide, correction]
        self.ops = [
            Route(
                logits=wide.data_ptr(),
                chosen=self.chosen.data_ptr(),
                weights=self.weights.data_ptr(),
                logits_stride=wide.stride(0),
                count=logits.shape[1],
                k=k,
                scores=SCORES[scores],
                correction=None if correction is None else correction.data_ptr(),
                **{"groups": 1, "groups_kept": 1, "scale": 1.0, **more},
            )
        ]

    def experts(self, weights, x, *, gathered, biases=None):
        y = torch.full((self.tokens * self.k + 2, weights[0].outputs + 3), POISON)
        self.holds += [x, y, weights, biases]
        biases = biases or [None] * len(weights)
        self.ops.append(program.experts(weights, biases, x, y, self.k, gathered=gathered))
        return y

    def go(self):
        self.team.run(Program(self.ops, ()), StepData(self.tokens))
        assert (self.chosen[-1] == -7).all() and (self.weights[-1] == POISON).all()


def valid_rows(run, y, outputs):
    """Return the valid rows of an operation's result, after a check that the margins are still poisoned."""
    pairs = run.tokens * run.k
    assert (y[pairs:] == POISON).all() and (y[:, outputs:] == POISON).all()
    return y[:pairs, :outputs]


def by_expert(run):
    """(row, expert) of each place."""
    found = [(t, e) for t, row in enumerate(run.chosen[: run.tokens].tolist()) for e in row]
    return sorted(found, key=lambda pair: pair[1])


@pytest.mark.parametrize("scores", ["softmax", "softmax_chosen"])
@pytest.mark.parametrize(("count", "k"), [(1, 1), (5, 1), (5, 2), (16, 4), (7, 7), (128, 8)])
def test_row_uses_the_experts_with_the_largest_logits(team, count, k, scores):
    logits = random(33, count) * 2
    logits[3] = logits[3].round()  # many equals
    logits[4] = 0.25
    run = Run(team, logits, k, scores)
    run.go()
    numbers, weights = route(logits, Routing(k, scores))
    for t in range(len(logits)):
        want_numbers, want_weights = chosen_by(logits[t], k, scores)
        assert run.chosen[t].tolist() == want_numbers == numbers[t].tolist()
        near(run.weights[t], torch.tensor(want_weights), 1e-6)
        near(weights[t], torch.tensor(want_weights), 1e-6)


def chosen_in_groups(logits, correction, routing):
    """Numbers and weights of a row's experts, by sorting in float64."""
    row = logits.double()
    scores = (row.sigmoid() if routing.scores == "sigmoid" else row.softmax(-1)).tolist()
    compared = [score + add for score, add in zip(scores, correction.double().tolist(), strict=True)]
    size = len(scores) // routing.groups
    inside = [sorted(compared[g * size : (g + 1) * size], reverse=True) for g in range(routing.groups)]
    totals = [most[0] if routing.group_score == "max" else sum(most[:2]) for most in inside]
    kept = sorted(range(routing.groups), key=lambda g: (-totals[g], g))[: routing.groups_kept]
    numbers = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: (-compared[e], e))
    numbers = numbers[: routing.top_k]
    total = sum(scores[e] for e in numbers) if routing.normalized else 1.0
    return numbers, [routing.scale * scores[e] / total for e in numbers]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(3, "sigmoid"),
        Routing(5, "sigmoid", scale=2.5),
        Routing(4, "sigmoid", 4, 2, "top_two", True, 1.5),
        Routing(6, "sigmoid", 8, 2),
        Routing(3, "softmax", 6, 2, "max", False, 16.0),
        Routing(4, "softmax", 3, 1, "top_two", True),
    ],
    ids=str,
)
def test_experts_of_the_best_groups_are_chosen_by_corrected_scores(team, routing, corrected):
    logits = random(33, 24) * 2
    correction = random(24) * 0.3 if corrected else torch.zeros(24)
    run = Run(
        team,
        logits,
        routing.top_k,
        routing.scores,
        correction if corrected else None,
        groups=routing.groups,
        groups_kept=routing.groups_kept,
        scale=routing.scale,
        top_two=routing.group_score == "top_two",
        normalized=routing.normalized,
    )
    run.go()
    numbers, weights = route(logits, routing, correction if corrected else None)
    for t in range(len(logits)):
        want_numbers, want_weights = chosen_in_groups(logits[t], correction, routing)
        assert run.chosen[t].tolist() == want_numbers == numbers[t].tolist()
        near(run.weights[t], torch.tensor(want_weights), 1e-5)
        near(weights[t], torch.tensor(want_weights), 1e-5)


def test_large_and_nan_router_logits(team):
    logits = torch.tensor(
        [[900.0, 899.0, -900.0, 0.0], [math.nan] * 4, [math.inf, 0.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]
    )
    run = Run(team, logits, 2)
    run.go()
    assert run.chosen[0].tolist() == [0, 1] and run.chosen[3].tolist() == [3, 2]
    near(run.weights[0], torch.tensor([1.0, 1.0]) * torch.tensor([0.0, -1.0]).softmax(0))
    for row in run.chosen[:4].tolist():
        assert len(set(row)) == 2 and set(row) <= set(range(4))
    assert run.weights[1].isnan().all() and run.weights[2].isnan().any() and run.weights[3].isfinite().all()


def routings(tokens, count):
    """Logits that spread the rows over experts in several ways."""
    even = random(tokens, count, seed=tokens)
    one = even.clone()
    one[:, count - 1] += 100.0  # takes all rows
    few = even.clone()
    few[:, 1 : count - 1] -= 100.0  # the others are empty
    return even, one, few


@pytest.mark.parametrize(("team", "form"), PAIRS, indirect=["team"])
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (33, 31), (70, 48), (130, 300)])
@pytest.mark.sampled(7)
def test_expert_linears_equal_matrix_products_for_any_routing(team, form, size):
    count = 5
    packed, restored = zip(
        *(made_in(team, form, random(*size, seed=e, dtype=torch.bfloat16)) for e in range(count)), strict=True
    )
    for tokens in (1, 13, 41):
        for k in (1, 2, count):
            for logits in routings(tokens, count):
                run = Run(team, logits, k)
                each, pairs = random(tokens, size[1], seed=1), random(tokens * k, size[1], seed=2)
                gathered = run.experts(packed, each, gathered=True)
                own = run.experts(packed, pairs, gathered=False)
                run.go()
                places = by_expert(run)
                want = torch.stack([product(form, each[t], restored[e]) for t, e in places])
                near(valid_rows(run, gathered, size[0]), want)
                want = torch.stack([product(form, pairs[at], restored[e]) for at, (_, e) in enumerate(places)])
                near(valid_rows(run, own, size[0]), want)


@pytest.mark.parametrize(("team", "form"), PAIRS, indirect=["team"])
def test_each_pair_gets_the_bias_of_its_expert(team, form):
    count, k, size = 5, 2, (33, 31)
    packed, restored = zip(
        *(made_in(team, form, random(*size, seed=e, dtype=torch.bfloat16)) for e in range(count)), strict=True
    )
    biases = [random(size[0], seed=50 + e) * 10 for e in range(count)]
    for tokens in (1, 41):
        for logits in routings(tokens, count):
            run, x = Run(team, logits, k), random(tokens, size[1], seed=1)
            y = run.experts(packed, x, gathered=True, biases=biases)
            run.go()
            want = torch.stack([product(form, x[t], restored[e]) + biases[e].double() for t, e in by_expert(run)])
            near(valid_rows(run, y, size[0]), want)


def mixture(team, logits, k, ups, downs, x, scores, shared=None, gate=None):
    """[tokens, hidden] of the whole mixture, and the rows that it is made of."""
    run = Run(team, logits, k, scores)
    tokens, inner, hidden = len(x), downs[0].inputs, downs[0].outputs
    up = torch.full((tokens * k, 2 * inner), POISON)
    activated = torch.full((tokens, k * inner), POISON)
    out = torch.full((tokens * k, hidden), POISON)
    y = torch.full((tokens, hidden + 3), POISON)
    run.ops += [
        program.experts(ups, [None] * len(ups), x, up, k, gathered=True),
        Activate(
            x=up.data_ptr(),
            y=activated.data_ptr(),
            x_stride=k * 2 * inner,
            y_stride=k * inner,
            inner=inner,
            groups=k,
            act=ACTS["silu"],
            gated=True,
            limit=math.inf,
        ),
        program.experts(downs, [None] * len(downs), activated.view(-1, inner), out, k, gathered=False),
        Combine(
            x=out.data_ptr(),
            weights=run.weights.data_ptr(),
            gate=None if gate is None else gate.data_ptr(),
            shared=None if shared is None else shared.data_ptr(),
            y=y.data_ptr(),
            x_stride=hidden,
            gate_stride=0 if gate is None else gate.stride(0),
            shared_stride=0 if shared is None else shared.stride(0),
            y_stride=y.stride(0),
            size=hidden,
            k=k,
            count=len(ups),
        ),
    ]
    run.go()
    assert (y[:, hidden:] == POISON).all()
    return y[:, :hidden].clone()


def weights_of(team, form, count, hidden, inner):
    ups = [made_in(team, form, random(2 * inner, hidden, seed=e, dtype=torch.bfloat16)) for e in range(count)]
    downs = [made_in(team, form, random(hidden, inner, seed=90 + e, dtype=torch.bfloat16)) for e in range(count)]
    return ups, downs


@pytest.mark.parametrize(("team", "form"), [pair for pair in PAIRS if pair[1] in FULL], indirect=["team"])
@pytest.mark.parametrize("scores", ["softmax", "softmax_chosen"])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_mixture_is_the_weighted_sum_of_its_experts(team, form, scores, k):
    count, hidden, inner = 6, 45, 19
    ups, downs = weights_of(team, form, count, hidden, inner)
    packed = [up for up, _ in ups], [down for down, _ in downs]
    for tokens in (1, 17):
        for logits in routings(tokens, count):
            x, shared, gate = random(tokens, hidden), random(tokens, hidden, seed=3), random(tokens, 4, seed=4)
            want = []
            for t in range(tokens):
                y = torch.zeros(hidden, dtype=torch.float64)
                for e, weight in zip(*chosen_by(logits[t], k, scores), strict=True):
                    left, right = product(form, x[t], ups[e][1]).split(inner)
                    y += weight * product(form, torch.nn.functional.silu(left) * right, downs[e][1])
                want.append(y)
            want = torch.stack(want)
            # An activation between two bf16 numbers may be rounded to the other one than in float64.
            within = 3e-3 if form == "pairs_bf16" else 1e-5
            near(mixture(team, logits, k, *packed, x, scores), want, within)
            near(mixture(team, logits, k, *packed, x, scores, shared), want + shared, within)
            opened = gate[:, :1].double().sigmoid()
            near(mixture(team, logits, k, *packed, x, scores, shared, gate), want + opened * shared, within)


@pytest.mark.parametrize(("team", "form"), PAIRS, indirect=["team"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.sampled(3)
def test_row_of_a_mixture_does_not_depend_on_other_rows(team, form, k):
    count, hidden, inner = 4, 130, 70
    ups, downs = weights_of(team, form, count, hidden, inner)
    packed = [up for up, _ in ups], [down for down, _ in downs]
    x, gate = random(60, hidden), random(60, 1, seed=4)
    x[7] *= 1e6  # a neighbour with another scale
    for logits in routings(60, count):

        def some(rows, logits=logits):
            return mixture(team, logits[rows], k, *packed, x[rows], "softmax", x[rows] * 2, gate[rows])

        alone = torch.cat([some([t]) for t in range(20)])
        for rows in (2, 3, 5, 13, 17, 20, 60):
            assert torch.equal(some(list(range(rows)))[:20], alone[:rows]), rows
        backwards = list(range(59, -1, -1))
        assert torch.equal(some(backwards).flip(0)[:20], alone)


def test_row_operations_may_follow_the_routing(team):
    x, logits = random(30, 16), random(30, 4)
    packed = [pack(random(8, 16, seed=e), team.tiling) for e in range(4)]
    want, got = Run(team, logits, 2), Run(team, logits, 2)
    rows = want.experts(packed, x, gathered=True)
    want.go()
    twice = 2 * x
    got.ops.append(Cap(x=twice.data_ptr(), stride=twice.stride(0), size=16, scale=0.5, cap=0.0))
    same = got.experts(packed, twice, gathered=True)
    got.go()
    assert torch.equal(valid_rows(got, same, 8), valid_rows(want, rows, 8))


def test_weights_of_unused_experts_are_not_read(team):
    """They are not even there: to read them would end the process."""
    x, logits = random(1, 48), random(1, 8)
    for weight in (
        random(64, 48),
        random(64, 48, dtype=torch.bfloat16),
        to_int8(random(64, 48), 64),
        to_int4(random(64, 48), 32),
    ):
        packed = [pack(weight, team.tiling, form_for(weight, team.tiling))] * 8
        run = Run(team, logits, 2)
        y = run.experts(packed, x, gathered=True)
        taken = chosen_by(logits[0], 2, "softmax")[0]
        for e in range(8):
            if e not in taken:
                run.ops[1].keep_alive[0][e].weight = None
        run.go()
        rows = valid_rows(run, y, 64)
        assert rows.isfinite().all() and torch.equal(rows[0], rows[1])


def test_nonfinite_row_does_not_affect_other_rows(team):
    for form in (FULL[0], "tiles_int8", "tiles_int4"):
        ups, downs = weights_of(team, form, 3, 40, 24)
        packed = [up for up, _ in ups], [down for down, _ in downs]
        x, logits = random(9, 40), random(9, 3, seed=1)
        want = mixture(team, logits, 2, *packed, x, "softmax")
        x[4], logits[4] = math.nan, math.nan
        got = mixture(team, logits, 2, *packed, x, "softmax")
        assert got[4].isnan().all()
        assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], want[[0, 1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("gathered", [True, False])
def test_adapters_change_no_pair_of_a_zero_computation_expert(team, gathered):
    """Experts from number `count` on have no matrices. Other memory follows the matrices of the last adapter."""
    tokens, count, k, rank, (outputs, inputs) = 7, 2, 3, 2, (9, 8)
    packed = [pack(random(outputs, inputs, seed=e), team.tiling, "tiles_f32") for e in range(count)]
    a, b = random(2, count, inputs, 16), random(2, count, rank, outputs, seed=1)
    ranks = torch.full((2, count, 1), rank, dtype=torch.int32)
    run = Run(team, random(tokens, count + 2), k)
    each, pairs = random(tokens, inputs, seed=2), random(tokens * k, inputs, seed=3)
    y = run.experts(packed, each, gathered=True)
    if not gathered:
        y = run.experts(packed, pairs, gathered=False)
    x = each if gathered else pairs
    # The step has one adapter.
    lora = program.lora_experts(a[:1], b[:1], ranks[:1], ((0, outputs, 0),), x, y, k, gathered=gathered)
    team.run(Program([*run.ops, lora], ()), StepData(tokens, adapters=torch.zeros(tokens, dtype=torch.int32)))
    for place, (token, expert) in enumerate(by_expert(run)):
        if expert >= count:
            assert (y[place] == POISON).all()
            continue
        row = x[token if gathered else place]
        change = row.double() @ a[0, expert, :, :rank].double() @ b[0, expert].double()
        near(y[place, :outputs], random(outputs, inputs, seed=expert).double() @ row.double() + change)
