"""Compare label scores of a running appliance with transformers' logits for the same checkpoint."""

from pathlib import Path

import httpx
import pytest
import torch
import transformers

DEMO = Path(__file__).resolve().parents[2] / "manifests" / "demo"
QUERY = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n17 + 25 = "
ITEMS = ["4", "42.", "", "12 apples and 中文"]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def next_logprobs(tokenizer):
    """Return a function from a text or token ids to the log probabilities of the next token in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def asked(prompt):
        ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1].double().log_softmax(0)

    return asked


def post(demo, path, **body):
    reply = httpx.post(f"{demo.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [True, False])
def test_scores_are_the_models_own(demo, tokenizer, next_logprobs, item_first, softmax):
    labels = tokenizer.encode("0123456789 .", add_special_tokens=False)
    asked = {"items": ITEMS, "label_token_ids": labels, "item_first": item_first, "apply_softmax": softmax}
    found = post(demo, "/generative_scoring", query=QUERY, **asked)
    assert (found["object"], found["model"], found["id"][:19]) == ("list", "demo", "generative-scoring-")
    assert [(one["index"], one["object"]) for one in found["data"]] == [(at, "score") for at in range(len(ITEMS))]
    prompts = [item + QUERY if item_first else QUERY + item for item in ITEMS]
    for one, prompt in zip(found["data"], prompts, strict=True):
        wanted = next_logprobs(prompt)[labels]
        wanted = wanted.softmax(0) if softmax else wanted.exp()
        assert one["label_scores"] == pytest.approx(wanted.tolist(), rel=2e-3, abs=1e-6)
        assert one["score"] == one["label_scores"][0]
    lengths = [len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (sum(lengths), len(ITEMS))


def test_ids_and_texts_may_be_mixed(demo, tokenizer, next_logprobs):
    ids = tokenizer.encode(QUERY, add_special_tokens=False)
    labels = tokenizer.encode("42", add_special_tokens=False)
    found = post(demo, "/generative_scoring", query=ids, items=["4", [220, 16]], label_token_ids=labels)
    for one, more in zip(found["data"], (tokenizer.encode("4", add_special_tokens=False), [220, 16]), strict=True):
        wanted = next_logprobs(ids + more)[labels].softmax(0)
        assert one["label_scores"] == pytest.approx(wanted.tolist(), rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("sampled", [False, True])
def test_logprobs_of_tokens_of_ones_own_choice(demo, tokenizer, next_logprobs, sampled):
    """Along a whole reply of completions and of chat, drawn or not, and in a stream as in a whole reply."""
    labels = [*tokenizer.encode("42 .", add_special_tokens=False), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    asked = {"logprob_token_ids": labels, "max_tokens": 6, "temperature": 1.0 if sampled else 0, "seed": 3}
    asked |= {"return_tokens_as_token_ids": True, "return_token_ids": True, "ignore_eos": True}
    reply = post(demo, "/v1/completions", model="demo", prompt=QUERY, logprobs=2, **asked)["choices"][0]
    prompt = tokenizer.encode(QUERY, add_special_tokens=False)
    for at, top in enumerate(reply["logprobs"]["top_logprobs"]):
        wanted = next_logprobs(prompt + reply["token_ids"][:at])
        drawn = reply["token_ids"][at]
        assert top.keys() == {f"token_id:{token}" for token in {drawn, *labels}}
        for name, value in top.items():
            assert value == pytest.approx(wanted[int(name.removeprefix("token_id:"))].item(), rel=1e-3, abs=2e-3)
    chat = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "logprobs": True, **asked}
    whole = post(demo, "/v1/chat/completions", **chat)["choices"][0]
    for one in whole["logprobs"]["content"]:
        assert [each["token"] for each in one["top_logprobs"]] == [f"token_id:{token}" for token in labels]
