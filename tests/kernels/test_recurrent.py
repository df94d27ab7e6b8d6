"""Operations of recurrent layers against float64 loops and transformers' own functions: rows of odd lengths, states
that are carried, fresh or strided, and rows that depend on nothing else, bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearRMSNormGated,
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    causal_conv1d_update,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from kernels.cpu import recurrent as compiled
from kernels.cpu.library import usable
from kernels.cpu.program import Team
from kernels.op import Make, Op
from kernels.recurrent.causal_conv import CAUSAL_CONV, convolved
from kernels.recurrent.delta_rule import DELTA_RULE
from kernels.recurrent.gated_norm import GATED_NORM
from kernels.recurrent.rg_lru import RG_LRU
from kernels.recurrent.selective_scan import SELECTIVE_SCAN

LENGTHS = (1, 2, 63, 64, 65, 130)
CPU = torch.device("cpu")
TOKENS = {"causal_conv": (0,), "delta_rule": (0, 1, 2, 3, 4), "selective_scan": (0, 1, 3, 4, 7), "rg_lru": (0, 1, 2)}
STATE = {"causal_conv": 4, "delta_rule": 7, "selective_scan": 8, "rg_lru": 6}


@pytest.fixture(scope="module", params=usable())
def team(request):
    made = Team(request.param, 2)
    yield made
    made.close()


def copied(args):
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


def drawn(op: Op, counts, seed=0, **sizes):
    return op.inputs(Make(CPU, torch.float32, seed), counts=counts, **sizes)


def near(got, want, tolerance=1e-5):
    """Relative to the root mean square of the wanted numbers. NaN is equal to NaN."""
    want = torch.as_tensor(want).double()
    size = want[want.isfinite()].square().mean().sqrt().nan_to_num()
    torch.testing.assert_close(got.double(), want, atol=float(tolerance * size), rtol=tolerance, equal_nan=True)


def wide(tensor):
    return tensor.double().numpy()


def softplus(x):
    return np.logaddexp(0.0, x)


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


def per_row(op: Op, args, loop):
    """Run `loop(row's arguments, state)` → (y, state) in float64 for each row; return y of all, and all states."""
    at = STATE[op.name]
    state, starts, slots, first = (args[at + number] for number in range(4))
    states, outputs = state.double().clone(), []
    for row, slot in enumerate(slots.tolist()):
        begin, end = starts[row : row + 2].tolist()
        own = [
            arg[begin:end] if number in TOKENS[op.name] and arg is not None else arg for number, arg in enumerate(args)
        ]
        before = np.zeros(state.shape[1:]) if int(first[row]) == 0 else wide(state[slot])
        y, after = loop([wide(one) if isinstance(one, torch.Tensor) else one for one in own], before)
        outputs.append(torch.as_tensor(y))
        states[slot] = torch.as_tensor(after)
    return torch.cat(outputs), states


def delta_loop(args, state):
    q, k, v, a, b, slopes, bias, _, _, _, _, scale, norm, beta_scale, bound = args
    y = np.zeros(v.shape)
    for t in range(len(v)):
        for head in range(v.shape[1]):
            key = head * q.shape[1] // v.shape[1]
            query, line = q[t, key], k[t, key]
            if norm:
                query, line = (one / np.sqrt((one * one).sum() + 1e-6) for one in (query, line))
            raw = a[t, head] + bias[head]
            gate = slopes[head] * softplus(raw) if bound is None else bound * sigmoid(-slopes[head] * raw)
            faded = np.exp(np.broadcast_to(gate, line.shape))[:, None] * state[head]
            beta = beta_scale * sigmoid(b[t, head])
            state[head] = faded + np.outer(line, beta * (v[t, head] - line @ faded))
            y[t, head] = query @ state[head] * scale
    return y, state


def scan_loop(args, state):
    x, dt, slopes, into, out_of, skip, bias, gate, _, _, _, _, limits = args
    y = np.zeros(x.shape)
    heads = x.shape[1]
    for t in range(len(x)):
        for head in range(heads):
            group = head * into.shape[1] // heads
            step = np.clip(softplus(dt[t, head] + (0 if bias is None else bias[head])), *limits)
            state[head] = np.exp(step * slopes[head]) * state[head] + step * np.outer(x[t, head], into[t, group])
            y[t, head] = state[head] @ out_of[t, group] + (0 if skip is None else skip[head] * x[t, head])
    return y if gate is None else y * gate * sigmoid(gate), state


def conv_loop(args, state):
    x, weight, bias, act, *_ = args
    width = weight.shape[1]
    inputs = np.concatenate((state.T, x))
    y = np.stack([(inputs[t : t + width].T * weight).sum(1) for t in range(len(x))])
    y += 0 if bias is None else bias
    return y * sigmoid(y) if act == "silu" else y, inputs[len(inputs) - width + 1 :].T


def rg_lru_loop(args, state):
    """Zeros are the state before a sequence."""
    x, gate, decay, gate_bias, decay_bias, rate, *_ = args
    y, is_first = np.zeros(x.shape), not state.any()
    for t in range(len(x)):
        u = sigmoid(gate[t] + gate_bias) * x[t]
        power = -8 * softplus(rate) * sigmoid(decay[t] + decay_bias)
        state = u if is_first else np.exp(power) * state + np.sqrt(1 - np.exp(2 * power)) * u
        y[t], is_first = state, False
    return y, state


LOOPS = {"causal_conv": conv_loop, "delta_rule": delta_loop, "selective_scan": scan_loop, "rg_lru": rg_lru_loop}
SIZES = [
    (CAUSAL_CONV, {"channels": 300, "width": 4}),
    (CAUSAL_CONV, {"channels": 256, "width": 3, "act": "none", "bias": False}),
    (CAUSAL_CONV, {"channels": 7, "width": 1}),
    *((DELTA_RULE, {"heads": (1, 2), "dims": dims}) for dims in ((32, 40), (64, 64), (128, 100), (256, 33))),
    (DELTA_RULE, {"heads": (2, 4), "dims": (33, 7), "qk_norm": False, "beta_scale": 2.0}),
    (DELTA_RULE, {"heads": (2, 2), "dims": (64, 65), "vector_decay": True}),
    (DELTA_RULE, {"heads": (1, 1), "dims": (20, 32), "vector_decay": True, "lower_bound": -5.0}),
    (SELECTIVE_SCAN, {"heads": 6, "size": 16, "width": 128, "groups": 2}),
    (SELECTIVE_SCAN, {"heads": 6, "size": 5, "width": 21, "groups": 3, "skip": 5, "dt_limits": (0.01, 1.0)}),
    (SELECTIVE_SCAN, {"heads": 37, "size": 1, "width": 16, "vector_a": True, "gated": True}),
    (SELECTIVE_SCAN, {"heads": 3, "size": 7, "width": 64, "skip": 0, "bias": False}),
    (SELECTIVE_SCAN, {"heads": 5, "size": 12, "width": 12, "groups": 5, "skip": 0, "bias": False, "dt_limits": (1, 1)}),
    (RG_LRU, {"channels": 300}),
    (RG_LRU, {"channels": 7}),
]
EACH = pytest.mark.parametrize(
    ("op", "sizes"), [pytest.param(*one, id=f"{one[0].name}-{at}") for at, one in enumerate(SIZES)]
)


def extreme(op, args):
    """Scale the raw gates so that e^x overflows in float32."""
    gates = {"delta_rule": 3, "selective_scan": 1}.get(op.name)
    return tuple(arg * 10 if at == gates else arg for at, arg in enumerate(args))


@pytest.mark.sampled(3)
@EACH
def test_bodies_equal_float64_loops(op, sizes, team):
    args = extreme(op, drawn(op, LENGTHS, **sizes))
    y, state = per_row(op, args, LOOPS[op.name])
    for body in (op.reference, lambda *args: op.compiled(team, *args)):
        got, after = body(*copied(args))
        near(got, y)
        near(after, state)


def chunk(op, args, begin, end):
    """Arguments of tokens [begin, end) of a single row, whose state is shared."""
    at = STATE[op.name]
    own = [arg[begin:end] if number in TOKENS[op.name] and arg is not None else arg for number, arg in enumerate(args)]
    own[at + 1] = torch.tensor([0, end - begin], dtype=torch.int32)
    own[at + 3] = args[at + 3] + begin
    return own


@EACH
def test_compiled_row_is_the_same_alone_and_in_any_chunking(op, sizes, team):
    args = drawn(op, (130, 1, 65, 2), seed=1, **sizes)
    y, state = op.compiled(team, *copied(args))
    single = Team(team.variant, 1)
    for row in range(4):
        own, pick = op.single_row(args, row)
        want, after = pick((y, state))
        for cuts in ((), (1,), (1, 3, 66), (63, 64), tuple(range(1, 20))):
            cuts = [0, *(cut for cut in cuts if cut < len(want)), len(want)]
            given = copied(own)
            pieces = [
                op.compiled(single if number % 2 else team, *chunk(op, given, *bounds))[0]
                for number, bounds in enumerate(zip(cuts, cuts[1:], strict=False))
            ]
            assert torch.equal(torch.cat(pieces), want), (row, cuts)
            assert torch.equal(given[STATE[op.name]], after), (row, cuts)
    single.close()


@EACH
def test_compiled_inputs_and_states_may_be_parts_of_wider_tensors(op, sizes, team):
    """The body changes no states of other layers or of rows without tokens, and reads nothing beside its inputs."""
    args = drawn(op, (3, 0, 20, 1), seed=2, pad=2, **sizes)
    at = STATE[op.name]
    y, state = op.compiled(team, *copied(args))
    places, pool = list(args), None
    for number in (*TOKENS[op.name], at):
        if args[number] is None:
            continue
        size = args[number][0].numel()
        buffer = torch.full((len(args[number]), size + 11), float("nan"))
        places[number] = buffer[:, 5 : 5 + size].view(args[number].shape)
        places[number].copy_(args[number])
        pool = buffer
    got, after = op.compiled(team, *places)
    tokens = int(args[at + 1][-1])
    assert torch.equal(got[:tokens], y[:tokens])
    assert torch.equal(after.nan_to_num(7.0), state.nan_to_num(7.0))
    assert pool[:, :5].isnan().all() and pool[:, -6:].isnan().all()
    idle = args[at + 2][1].long()
    assert torch.equal(after[idle].nan_to_num(7.0), args[at][idle].nan_to_num(7.0))


def only(op, args):
    """The arguments of one row, its state with an axis for the batch, and without rows."""
    at = STATE[op.name]
    slot = args[at + 2].long()
    return args[:at], args[at][slot], args[at + 4 :]


@pytest.mark.parametrize("function", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_delta_rule_equals_qwen3_next(function):
    args = drawn(DELTA_RULE, (3, 70), heads=(2, 4), dims=(32, 16))
    args, _ = DELTA_RULE.single_row(args, 1)
    (q, k, v, a, b, slopes, bias), state, (scale, *_) = only(DELTA_RULE, args)
    gate = slopes * torch.nn.functional.softplus(a + bias)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    y, after = function(q[None], k[None], v[None], gate[None], b.sigmoid()[None], **options)
    got, found = DELTA_RULE.reference(*args)
    assert scale == 32**-0.5
    near(got, y[0], 1e-4)
    near(found, after, 1e-4)


@pytest.mark.parametrize("function", [recurrent_kimi_delta_attention, chunk_kimi_delta_attention])
@pytest.mark.parametrize("bound", [None, -4.0])
def test_delta_rule_equals_kimi_linear(function, bound):
    args = drawn(DELTA_RULE, (3, 70), heads=(2, 2), dims=(32, 32), vector_decay=True, lower_bound=bound)
    args, _ = DELTA_RULE.single_row(args, 1)
    (q, k, v, a, b, slopes, bias), state, _ = only(DELTA_RULE, args)
    projection = SimpleNamespace(head_dim=32, num_heads=2, A_log=(-slopes).log(), dt_bias=bias.flatten())
    projection.safe_gate_lower_bound, projection.f_a_proj, projection.f_b_proj = bound, lambda x: x, lambda x: x
    gate = Glm5NextTextForgetGate.forward(projection, a.flatten(1)[None])
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    y, after = function(q[None], k[None], v[None], g=gate, beta=b.sigmoid()[None], **options)
    got, found = DELTA_RULE.reference(*args)
    near(got, y[0], 1e-4)
    near(found, after, 1e-4)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.05, 1.5)])
def test_selective_scan_equals_mamba_2(limits):
    args = drawn(SELECTIVE_SCAN, (3, 70), heads=6, size=8, width=16, groups=2, dt_limits=limits)
    args, _ = SELECTIVE_SCAN.single_row(args, 1)
    (x, dt, slopes, into, out_of, skip, bias, _), state, _ = only(SELECTIVE_SCAN, args)
    tensors = (one[None] for one in (x, dt))
    options = {"dt_bias": bias, "dt_softplus": True, "dt_limit": limits, "initial_states": state}
    options |= {"D": skip, "return_final_states": True}
    y, after = mamba2_chunk_scan(*tensors, slopes, into[None], out_of[None], 32, **options)
    got, found = SELECTIVE_SCAN.reference(*args)
    near(got, y[0], 1e-4)
    near(found, after, 1e-4)


def test_selective_scan_equals_mamba():
    args = drawn(SELECTIVE_SCAN, (70,), heads=24, size=1, width=16, vector_a=True, gated=True)
    (x, dt, slopes, into, out_of, skip, bias, gate), _, _ = only(SELECTIVE_SCAN, args)
    columns = [one.flatten(1).T[None] for one in (x, dt, into, out_of, gate)]
    options = {"delta_bias": bias, "delta_softplus": True, "return_last_state": True}
    y, after = mamba_selective_scan(columns[0], columns[1], slopes, columns[2], columns[3], skip, columns[4], **options)
    got, found = SELECTIVE_SCAN.reference(*args)
    near(got.flatten(1), y[0].T, 1e-4)
    near(found[args[10].long()].squeeze(2), after, 1e-4)


@torch.no_grad()
def test_rg_lru_equals_recurrent_gemma():
    """A sequence in two steps; the module multiplies by the matrices of the gates itself."""
    module = RecurrentGemmaRglru(SimpleNamespace(num_attention_heads=3, lru_width=24))
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    x = torch.randn(20, 24, generator=torch.Generator().manual_seed(1))
    steps = zip(x.split((13, 7)), torch.arange(20).split((13, 7)), strict=True)
    want = torch.cat([module(part[None], place[None])[0] for part, place in steps])
    weights = module.input_gate_weight, module.recurrent_gate_weight
    gates = [torch.einsum("thi,hio->tho", x.unflatten(1, (3, 8)), weight).flatten(1) for weight in weights]
    biases = module.input_gate_bias.flatten(), module.recurrent_gate_bias.flatten(), module.recurrent_param
    place = torch.tensor([0, 20]), torch.tensor([0]), torch.tensor([0])
    y, state = RG_LRU.reference(x, *gates, *biases, torch.full((1, 24), float("nan")), *place)
    near(y, want)
    near(state[0], want[-1])


@pytest.mark.parametrize("width", [1, 2, 5])
def test_causal_conv_without_a_state_begins_every_row_with_zeros(team, width):
    """This applies at any position, and to torch as well as to the compiled kernel."""
    counts = (1, 7, 33)
    x, weight, bias, _, state, starts, slots, _ = drawn(CAUSAL_CONV, counts, channels=37, width=width)
    zeros = torch.zeros_like(state)
    want, _ = CAUSAL_CONV.reference(x, weight, bias, "none", zeros, starts, slots, torch.zeros(3, dtype=torch.int64))
    y, kept = compiled.causal_conv(team, x, weight, bias, "none", None, starts, slots, torch.tensor([0, 4, 9]))
    near(y, want)
    near(convolved(x, weight, bias, counts), want)
    assert kept is None


def test_causal_conv_equals_qwen3_next():
    args = drawn(CAUSAL_CONV, (9,), channels=12, width=4)
    x, weight, bias, act, state, _, slots, _ = args
    y, after = CAUSAL_CONV.reference(*args)
    near(y, causal_conv1d_fn(x.T[None], weight, bias, act)[0].T)
    own = after[slots.long()].clone()
    later = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    want = causal_conv1d_update(later.T[None], own, weight, bias, act)[0].T
    place = torch.tensor([0, 1]), slots, torch.tensor([9])
    near(CAUSAL_CONV.reference(later, weight, bias, act, state, *place)[0], want)
    near(state[slots.long()], own)


def norms():
    """Yield a module of transformers and the sizes and options of the same operation."""
    yield KimiLinearRMSNormGated(24, eps=1e-5), {"size": 24, "groups": 3, "act": "sigmoid"}, True
    yield Qwen3NextRMSNormGated(24, eps=1e-5), {"size": 24, "groups": 3}, True
    yield MambaRMSNormGated(72, 24, eps=1e-5), {"size": 24, "groups": 3, "gate_first": True, "shared": False}, False
    yield FalconH1RMSNormGated(72, 1e-5, 3, True), {"size": 24, "groups": 3, "shared": False}, False


@pytest.mark.parametrize(("module", "sizes", "heads"), list(norms()), ids=lambda one: type(one).__name__)
@torch.no_grad()
def test_gated_norm_equals_transformers(module, sizes, heads, team):
    args = GATED_NORM.inputs(Make(CPU, torch.float32), rows=5, **sizes)
    x, gate, weight = args[:3]
    module.weight.copy_(weight)
    shape = (-1, sizes["size"]) if heads else x.shape
    want = module(x.view(shape), gate.view(shape)).view(x.shape)
    near(GATED_NORM.reference(*args), want)
    near(GATED_NORM.compiled(team, *args), want)


def test_bodies_refuse_states_and_inputs_that_they_cannot_address():
    args = drawn(CAUSAL_CONV, (2,), channels=8, width=4)
    for state in (args[4].half(), args[4].transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(ValueError, match="state: must be float32 and contiguous within a slot"):
            CAUSAL_CONV(*args[:4], state, *args[5:])
    with pytest.raises(ValueError, match="activation 'gelu'"):
        CAUSAL_CONV(*args[:3], "gelu", *args[4:])
    args = drawn(DELTA_RULE, (2,), heads=(2, 2), dims=(16, 16))
    with pytest.raises(ValueError, match="k: the elements of a token must be contiguous"):
        DELTA_RULE(args[0], args[1].transpose(1, 2).contiguous().transpose(1, 2), *args[2:])
    gated = GATED_NORM.inputs(Make(CPU, torch.float32), rows=1, size=8, groups=1)
    with pytest.raises(ValueError, match="gate 'relu'"):
        GATED_NORM(*gated[:4], False, "relu", 1)
