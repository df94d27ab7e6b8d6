"""Compare encoder-decoder models in the whole engine with transformers in float32.

Encoder inputs are computed once, together with decode steps of other requests, in steps that they just fit into;
requests are preempted and resumed. None of this may change a token or a logprob.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.models.t5.modeling_t5 import T5Attention

from engine.api.errors import CheckpointError, ConfigError, RequestError
from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.loaded import distance_buckets
from engine.layers.model import TextModel
from engine.layers.reference import executor as reference
from engine.layers.reference.run import Run
from engine.layers.step import Step
from engine.llm import LLM, Params
from engine.lowering.footprint import mapped_bytes, part_bytes
from engine.lowering.lower import lower
from engine.lowering.operations import Attend, WriteKV
from engine.models.checkpoint import read_checkpoint
from engine.models.families import ARCHITECTURES
from engine.models.parts import Alibi, Head, RelativeBias
from kernels.cpu.library import best, usable
from tests.engine.layers.planned import predicted
from tests.engine.sourced import save
from tests.engine.translators import CASES, LONGEST, T5_SIZES, VOCAB, Translator, write
from tests.tiers import paired

TOLERANCE = 2e-4  # of a logprob
SMALL = {"block_tokens": 4, "kv_bytes": 1 << 20, "threads": 1, "max_running": 5, "max_step_tokens": LONGEST + 5}
KERNELS = ("torch", best())


@pytest.fixture(scope="module", params=CASES)
def translator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Translator:
    return write(tmp_path_factory.mktemp("translators"), request.param)


@pytest.fixture(params=dict.fromkeys(KERNELS))
def kernels(request: pytest.FixtureRequest) -> dict[str, Any]:
    """SMALL with torch, and with the fastest compiled kernels."""
    return {**SMALL, "kernels": request.param}


@pytest.fixture
def bart(tmp_path: Path) -> Translator:
    return write(tmp_path, "bart")


def sources(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 7, LONGEST, 4, 16, 29, 17, 3)]


def greedy(count: int) -> Params:
    return Params(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=3)


def assert_same(translator: Translator, source: list[int], made) -> None:
    reply = [*translator.begins, *made.ids]
    expected = translator.logits(source, reply[:-1])[len(translator.begins) - 1 :].log_softmax(-1)
    assert made.ids == expected.argmax(-1).tolist()
    for position, found in enumerate(made.logprobs):
        values, ids = expected[position].topk(3)
        assert found.logprob == pytest.approx(expected[position, found.token].item(), abs=TOLERANCE)
        assert found.top_logprobs == pytest.approx(values.tolist(), abs=TOLERANCE)
        assert found.top_ids == tuple(ids.tolist())


@pytest.mark.parametrize(("translator", "kernels"), paired(CASES, [*dict.fromkeys(KERNELS)]), indirect=True)
def test_replies_are_transformers_alone_beside_others_and_again(translator, kernels, shows):
    each = sources(1)
    with LLM(translator.path, **kernels) as llm:
        together = llm.generate(each, greedy(12))
        again = llm.generate(each[::-1], greedy(12))[::-1]
    with LLM(translator.path, **{**kernels, "max_running": 1}) as llm:
        alone = llm.generate(each[:3], greedy(12))
    for source, made, repeated in zip(each, together, again, strict=True):
        assert_same(translator, source, made)
        assert made.ids == repeated.ids and made.timing.cached_tokens == repeated.timing.cached_tokens == 0
    assert [one.ids for one in alone] == [one.ids for one in together[:3]]
    shows(translator.path, "equals transformers" if kernels["kernels"] == "torch" else "compiled CPU")


@pytest.mark.sampled(5)
def test_preempted_requests_read_their_source_again_and_go_on(translator, kernels, shows):
    form = layout(read_checkpoint(translator.path).model, block_tokens=4, element_bytes=4)
    longest = LONGEST + 20
    tight = {"max_context": longest, "kv_bytes": (form.blocks_for(longest) + 1) * form.block_bytes}
    with LLM(translator.path, **{**kernels, **tight}) as llm:
        made = llm.generate(sources(2), greedy(18))
    assert sum(one.timing.preemptions for one in made) > 0, "the cache was large enough for all"
    for source, one in zip(sources(2), made, strict=True):
        assert_same(translator, source, one)
    shows(translator.path, "preempted")


@pytest.mark.sampled(7)
def test_two_processes_equal_transformers(translator, kernels, shows):
    """Each rank has half of the heads (6 of the encoder, 4 of the decoder); the vocabulary of 97 splits unevenly."""
    with LLM(translator.path, **kernels, tensor=2) as llm:
        for source, made in zip(sources(4), llm.generate(sources(4), greedy(9)), strict=True):
            assert_same(translator, source, made)
    shows(translator.path, "2 ranks")


def test_ranks_that_do_not_divide_the_heads_of_the_encoder_are_refused(tmp_path):
    made = write(tmp_path, "bart", encoder_attention_heads=3)
    with pytest.raises(ConfigError, match="2 ranks cannot share 3 heads; use one of 1, 3 ranks"):
        LLM(made.path, **SMALL, tensor=2).close()


def test_a_reply_ends_where_the_decoder_has_no_positions_left(translator):
    with LLM(translator.path, **SMALL) as llm:
        (made,) = llm.generate([[5, 6, 7]], greedy(1000))
    assert made.finish == "length" and len(made.ids) == LONGEST + 1 - len(translator.begins) - 1
    assert_same(translator, [5, 6, 7], made)


def test_weights_take_what_was_planned_to_the_byte(translator, shows):
    checkpoint = read_checkpoint(translator.path)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        form = layout(checkpoint.model, block_tokens=4, element_bytes=4)
        model = TextModel(checkpoint.model, form, SINGLE, dtype, "cpu")
        model.load(checkpoint)
        wanted = predicted(checkpoint, "torch", name)
        assert part_bytes(wanted) == model.memory_usage.parts
        assert mapped_bytes(wanted) == model.memory_usage.mapped
    shows(translator.path, "loads", "planned bytes = loaded bytes")


def test_a_source_is_read_once_and_no_decode_step_runs_the_encoder(bart, monkeypatch):
    read: list[tuple[int, ...]] = []
    execute = reference.execute

    def counted(ops, run, *more):
        if not ops[0].weight.own_tokens:  # of the encoder
            read.append(run.step.count)
        return execute(ops, run, *more)

    monkeypatch.setattr(reference, "execute", counted)
    with LLM(bart.path, **SMALL, kernels="torch") as llm:
        read.clear()  # what made it warm
        llm.generate([[5, 6, 7], [8, 9]], greedy(20))
    assert sorted(sum(read, ())) == [2, 3]


def test_encoder_attends_to_later_tokens(bart):
    """Two encoder inputs with the same prefix have different first states, because the encoder is not causal."""
    checkpoint = read_checkpoint(bart.path)
    form = layout(checkpoint.model, block_tokens=4, element_bytes=4)
    model = TextModel(checkpoint.model, form, SINGLE, torch.float32, "cpu")
    model.load(checkpoint)
    states = []
    for source in ([5, 6, 7], [5, 6, 8]):
        step = Step(torch.empty(0), (), (), {}, (3,))
        run = Run(model.weights, SINGLE, (), torch.float32, step, torch.tensor(source), torch.arange(3))
        ops = [op for op in model.program.encoder if not isinstance(op, WriteKV)]
        with torch.inference_mode():
            reference.execute(ops, run)
        states.append(run[model.program.encoder_out])
    assert (states[0][0] - states[1][0]).abs().max() > 1e-3
    expected = bart.model.model.encoder(torch.tensor([[5, 6, 7]])).last_hidden_state[0]
    torch.testing.assert_close(states[0], expected, atol=2e-5, rtol=0)


def test_a_sequence_holds_the_blocks_of_its_tokens_and_no_more(bart):
    """Cross-attention keys share the pages of the decoder's self-attention, at positions that it does not read."""
    model = read_checkpoint(bart.path).model
    form = layout(model, block_tokens=4, element_bytes=4)
    assert len(form.groups) == 1 and form.layers_per_block == len(model.blocks) == 3
    assert form.blocks_for(LONGEST + 20) == 15


def test_drawn_tokens_depend_on_neither_batch_nor_preemption(bart):
    each = sources(4)
    params = [
        Params(temperature=0.9, top_p=0.95, seed=i, max_tokens=14, ignore_eos=True, repetition_penalty=1.1)
        for i in range(len(each))
    ]
    form = layout(read_checkpoint(bart.path).model, block_tokens=4, element_bytes=4)
    with LLM(bart.path, **{**SMALL, "max_running": 1}) as llm:
        alone = [one.ids for one in llm.generate(each, params)]
    tight = {"max_context": 60, "kv_bytes": (form.blocks_for(60) + 1) * form.block_bytes}
    with LLM(bart.path, **{**SMALL, **tight}) as llm:
        together = llm.generate(each, params)
    assert [one.ids for one in together] == alone
    assert sum(one.timing.preemptions for one in together) > 0


@pytest.mark.parametrize(("source", "says"), [([5] * (LONGEST + 1), f"1 to {LONGEST}"), ([], "1 to")])
def test_invalid_encoder_inputs_are_rejected(bart, source, says):
    with LLM(bart.path, **SMALL) as llm:
        with pytest.raises(RequestError, match=says):
            llm.generate([source], greedy(3))
        assert len(llm.generate([[5, 6]], greedy(3))[0].ids) == 3


def test_prompt_logprobs_of_a_source_are_refused(bart):
    with LLM(bart.path, **SMALL) as llm, pytest.raises(RequestError, match="not available for encoder-decoder"):
        llm.generate([[5, 6]], Params(max_tokens=2, prompt_logprobs=1))


def test_a_row_that_is_added_to_the_logits_may_be_missing(bart):
    file = bart.path / "model.safetensors"
    tensors = load_file(file)
    del tensors["final_logits_bias"]
    save_file(tensors, file, {"format": "pt"})
    bart.model.final_logits_bias.zero_()
    with LLM(bart.path, **SMALL) as llm:
        assert_same(bart, [5, 6, 7], llm.generate([[5, 6, 7]], greedy(5))[0])


def test_the_table_of_tokens_may_be_there_under_its_other_names(bart):
    file = bart.path / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.shared.weight"]
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = table.clone()
    save_file(tensors, file, {"format": "pt"})
    with LLM(bart.path, **SMALL) as llm:
        assert_same(bart, [5, 6, 7], llm.generate([[5, 6, 7]], greedy(5))[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decoder_start_token_id": None, "bos_token_id": None}, "decoder_start_token_id is missing"),
        ({"encoder_attention_heads": 5}, "encoder_attention_heads is 5; d_model, 48, must be a multiple of it"),
        ({"share_encoder_decoder_embeddings": False}, "one token embedding"),
        ({"tie_word_embeddings": False}, "one token embedding"),
        ({"activation_function": "mish"}, "activation_function is 'mish'"),
        ({"decoder_layers": 4}, "lacks model.decoder.layers.3"),
    ],
)
def test_unsupported_features_are_reported(bart, change, says):
    file = bart.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (bart.path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=says):
        LLM(bart.path, **SMALL)


def test_t5_reads_and_writes_texts_like_its_tokenizer(tmp_path):
    """Encoder inputs end with `</s>`, a sentinel is one token, and special tokens are not in the reply."""
    made = save(tmp_path, "flan-t5")
    prompt = "the quick <extra_id_0> fox says<extra_id_1>"
    theirs = AutoTokenizer.from_pretrained(made.path)
    assert theirs(prompt).input_ids == made.ids(prompt) and made.ids(prompt)[-1] == 1
    with LLM(made.path, **{**SMALL, "max_step_tokens": 69}) as llm:
        (found,) = llm.generate([prompt], greedy(24))
        (same,) = llm.generate([made.ids(prompt)], greedy(24))
    assert found.ids == same.ids == made.greedy(prompt, 24, begins=[0])
    assert found.text == theirs.decode(found.ids, skip_special_tokens=True)
    assert set(found.ids) - set(theirs.all_special_ids), "the reply has a text"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj is 'gated-mish'; supported are silu"),
        ({"feed_forward_proj": "double-gelu"}, "feed_forward_proj is 'double-gelu'"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets is 3; it must be .* at least 4"),
        ({"relative_attention_max_distance": 3}, "max_distance is 3; it must be greater than half of .*, 7"),
        ({"relative_attention_max_distance": 10**6}, "max_distance is 1000000; it must be at most 65,536"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id is missing"),
        ({"relative_attention_num_buckets": 8}, r"relative_attention_bias.weight has shape \[7, 2\]"),
    ],
)
def test_wrong_values_of_t5_are_reported(tmp_path, change, says):
    path = write(tmp_path, "flan-t5").path
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=says):
        LLM(path, **SMALL)


@pytest.mark.parametrize(("kind", "scale"), [("T5", 64**-0.5), ("MT5", 1.0), ("UMT5", 64**-0.5)])
def test_heads_of_t5_models_are_tied_and_scaled_as_in_transformers(kind, scale):
    """A config.json of transformers 5 has `scale_decoder_outputs`; older ones say it by `tie_word_embeddings`."""
    config = {"architectures": [f"{kind}ForConditionalGeneration"], **T5_SIZES, "d_model": 64}
    declare = ARCHITECTURES[config["architectures"][0]]
    assert declare(config).head == Head(tied=True, scale=scale, tied_unless_stored=True)
    for change in ({"tie_word_embeddings": False}, {"scale_decoder_outputs": False}):
        assert declare(config | change).head.scale == 1.0
    tables = {op.bias.name for op in lower(declare(config)).encoder if isinstance(op, Attend)}
    assert len(tables) == (config["num_layers"] if kind == "UMT5" else 1)


@pytest.mark.parametrize(("heads", "buckets", "distance"), [(3, 9, 17), (5, 4, 3)])
@pytest.mark.parametrize("kernels", usable() or ["torch"])
def test_t5_of_odd_sizes_equals_transformers_in_every_variant(tmp_path, kernels, heads, buckets, distance):
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": distance}
    made = write(tmp_path, "t5", num_heads=heads, d_kv=7, **sizes)
    with LLM(made.path, **{**SMALL, "kernels": kernels, "block_tokens": 3}) as llm:
        for source, found in zip(sources(5), llm.generate(sources(5), greedy(9)), strict=True):
            assert_same(made, source, found)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (7, 11), (4, 3), (10, 1000)])
def test_buckets_of_distances_are_those_of_transformers(bidirectional, buckets, distance):
    part = RelativeBias(buckets=buckets, max_distance=distance, bidirectional=bidirectional, source="")
    theirs = T5Attention._relative_position_bucket(
        torch.arange(-2 * distance, 2 * distance + 1), bidirectional, buckets, distance
    )
    assert torch.equal(distance_buckets(part), theirs[distance:-distance])
    assert (theirs[:distance] == theirs[distance]).all() and (theirs[-distance:] == theirs[-distance - 1]).all()


@pytest.mark.parametrize("more", [{"source": True}, {"alibi": Alibi()}])
def test_relative_biases_elsewhere_are_refused(tmp_path, more):
    checkpoint = read_checkpoint(write(tmp_path, "t5").path)
    first, *others = checkpoint.model.blocks[0]
    own = others[0] if "source" in more else first
    wrong = replace(own, body=replace(own.body, relative=first.body.relative, **more))
    blocks = ((wrong, *others) if own is first else (first, wrong, *others[1:]),) * 2
    model = replace(checkpoint.model, blocks=blocks)
    with pytest.raises(ConfigError, match="relative biases require self-attention without ALiBi"):
        TextModel(model, layout(model, block_tokens=4, element_bytes=4), SINGLE, torch.float32, "cpu")


def test_a_head_of_t5_is_tied_unless_the_checkpoint_has_one(tmp_path):
    """`tie_word_embeddings` does not decide: transformers 5 always writes true."""
    path = write(tmp_path, "flan-t5").path
    config, file = json.loads((path / "config.json").read_text()), path / "model.safetensors"
    for stored, said in ((True, True), (False, False)):
        (path / "config.json").write_text(
            json.dumps(config | {"tie_word_embeddings": said, "scale_decoder_outputs": False})
        )
        assert read_checkpoint(path).model.head == Head(tied=not stored, tied_unless_stored=True)
        save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file, {"format": "pt"})
