"""Tests of mBART, an encoder-decoder model, through the official client.

Replies equal transformers' greedy search, also when the engine crashes."""

import io
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from appliance.checkpoints.lockfile import lock_path, read_lock
from appliance.cli.main import main
from tests.e2e.conftest import ROOT, SLIPWAY, Appliance
from tests.engine.sourced import Sourced, save

TEXT = "hello world, what is 17 + 25?"
TOKENS, LONG = 24, 240


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Sourced:
    return save(tmp_path_factory.mktemp("sourced"), "mbart", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def manifest(bart: Sourced) -> Path:
    path = bart.path.parent / "m.yaml"
    more = "engine: {record: flight.bin, scheduling: {max_running: 8}}\n"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {bart.path}}}, names: [bart]}}\n{more}")
    return path


@pytest.fixture(scope="module")
def appliance(launch: Callable[..., Appliance], manifest: Path) -> Appliance:
    made = launch(manifest)
    made.wait_ready()
    return made


def client(appliance: Appliance) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{appliance.url}/v1", api_key="none", max_retries=0)


def asked(appliance: Appliance, prompt: object = TEXT, tokens: int = TOKENS, **more: object) -> openai.types.Completion:
    return client(appliance).completions.create(
        model="bart",
        prompt=prompt,  # type: ignore[arg-type]
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, **more},
    )


def ids(reply: openai.types.Completion) -> list[int]:
    return list(reply.choices[0].token_ids)  # type: ignore[attr-defined]


def test_a_completion_is_what_transformers_generates(appliance: Appliance, bart: Sourced) -> None:
    for text in (TEXT, "fox"):
        expected, found = bart.greedy(text, TOKENS), asked(appliance, text)
        assert ids(found) == expected and len(set(expected)) > 1
        assert found.choices[0].text == bart.text(expected)
        assert found.usage is not None and found.usage.prompt_tokens == len(bart.ids(text))
        assert ids(asked(appliance, bart.ids(text))) == expected
    assert bart.greedy(TEXT, TOKENS) != bart.greedy("fox", TOKENS)


def test_several_sources_at_once_do_not_touch_one_another(appliance: Appliance, bart: Sourced) -> None:
    texts = [TEXT, "fox", "the lazy dog " * 60, "a", "brown " * 90]
    found = asked(appliance, texts)
    assert [list(one.token_ids) for one in found.choices] == [bart.greedy(text, TOKENS) for text in texts]  # type: ignore[attr-defined]


def test_a_stream_has_the_same_text(appliance: Appliance, bart: Sourced) -> None:
    stream = client(appliance).completions.create(
        model="bart", prompt=TEXT, max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == bart.text(bart.greedy(TEXT, TOKENS))


def test_a_reply_begins_with_what_the_request_says(appliance: Appliance, bart: Sourced) -> None:
    french = bart.tokenizer.token_to_id("fra_Latn")
    expected = bart.greedy(TEXT, TOKENS, begins=(2, french))
    assert ids(asked(appliance, decoder_prompt="fra_Latn")) == expected != bart.greedy(TEXT, TOKENS)
    assert ids(asked(appliance, decoder_prompt=[2, french])) == expected
    assert ids(asked(appliance, decoder_prompt="")) == bart.greedy(TEXT, TOKENS, begins=(2,))


def test_logprobs_and_schemas_are_those_of_the_reply(appliance: Appliance) -> None:
    lists = asked(appliance, logprobs=2).choices[0].logprobs
    assert lists is not None and lists.token_logprobs is not None and len(lists.token_logprobs) == TOKENS
    bound = {"structured_outputs": {"choice": ["the dog", "the fox"]}}
    found = client(appliance).completions.create(model="bart", prompt=TEXT, temperature=0, extra_body=bound)
    assert found.choices[0].text in ("the dog", "the fox")


def test_what_cannot_be_read_is_refused_before_it_waits(appliance: Appliance) -> None:
    for body, words in (
        ({"prompt": [5] * 1025}, "encoder reads at most 1024 tokens"),
        ({"prompt": "x", "echo": True}, "echo is not possible"),
        ({"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs is not available"),
    ):
        answer = appliance.client.post("/v1/completions", json=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    answer = appliance.client.post("/v1/chat/completions", json=talk)
    assert answer.status_code == 400 and "Use /v1/completions" in answer.json()["error"]["message"]


def test_the_longest_source_is_read_beside_running_replies(appliance: Appliance, bart: Sourced) -> None:
    long = [5 + number % 80 for number in range(1024)]
    found = asked(appliance, [long, bart.ids("fox")], 12)
    expected = [bart.greedy(long, 12), bart.greedy("fox", 12)]
    assert [list(one.token_ids) for one in found.choices] == expected  # type: ignore[attr-defined]


def test_chat_says_which_route_to_use(
    appliance: Appliance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", appliance.url]) == 1 and "/v1/completions" in capsys.readouterr().err


@pytest.mark.nightly("tests/e2e/test_images.py::test_a_stream_with_an_image_survives_a_kill_of_its_engine")
def test_a_stream_goes_on_when_its_engine_is_killed(appliance: Appliance, bart: Sourced) -> None:
    """The next engine needs the encoder input, the decoder prompt and all tokens so far, or the rest would differ."""
    french = bart.tokenizer.token_to_id("fra_Latn")
    body = {"prompt": TEXT, "decoder_prompt": "fra_Latn", "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    expected = bart.greedy(TEXT, LONG, begins=(2, french))
    victim, found = appliance.pids()["engine-0"], list[int]()
    with appliance.client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"][0]["token_ids"]
                if victim and len(found) > 40:
                    os.kill(victim, signal.SIGKILL)
                    victim = 0
    assert found == expected
    assert appliance.metric("slipway_request_interruptions_total") > 0


def test_a_reply_with_a_key_goes_on_in_another_gateway(appliance: Appliance, bart: Sourced) -> None:
    appliance.wait_ready()
    body = {"prompt": TEXT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True, "stream": True}
    headers, texts, last = {"Idempotency-Key": "sourced"}, list[str](), ""
    victim = appliance.pids()["gateway"]
    try:
        with appliance.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            for line in reply.iter_lines():
                if line.startswith("id: "):
                    last = line[4:]
                elif line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])
                    if victim and len(texts) > 40:
                        os.kill(victim, signal.SIGKILL)
                        victim = 0
    except httpx.TransportError:
        pass
    assert not victim
    appliance.wait_ready()
    whole = {**body, "stream": False}
    expected = bart.text(bart.greedy(TEXT, LONG))
    assert last and expected.startswith("".join(texts))
    with appliance.client.stream(
        "POST", "/v1/completions", json=body, headers={**headers, "Last-Event-ID": last}
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(texts) == expected
    assert appliance.client.post("/v1/completions", json=whole).json()["choices"][0]["text"] == expected


def test_what_was_recorded_is_replayed_and_tried_with_other_settings(appliance: Appliance, manifest: Path) -> None:
    """Last: the recording is whole when the service has stopped."""
    assert appliance.stop() == 0
    record = str(manifest.with_name("flight.bin"))
    for command in (["replay", record], ["whatif", record, "--set", "engine.scheduling.max_running=2"]):
        assert main(command) == 0, command


@pytest.mark.nightly("tests/e2e/test_drift.py::test_weights_other_than_the_lock_s_end_a_start_naming_the_prompt")
def test_a_lock_has_golden_prompts_that_agree_and_a_start_is_held_to_them(
    launch: Callable[..., Appliance], bart: Sourced, tmp_path: Path
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {bart.path}}}}}\n")
    for command in ("lock", "selftest"):
        done = subprocess.run([*SLIPWAY, command, str(path)], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits") == 4
    golden = read_lock(lock_path(path)).golden
    assert golden is not None and all(0 < one.prompt.source < len(one.prompt.ids) for one in golden.goldens)
    appliance = launch(path)
    appliance.wait_ready()
    assert appliance.stop() == 0
