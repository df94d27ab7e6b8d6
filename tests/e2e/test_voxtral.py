"""Voxtral through the running service: transcripts and replies of chat equal those of transformers.

The model is small, with random weights and the tokenizer of the demo.
"""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import soundfile
import torch
import transformers
from tokenizers import AddedToken, Tokenizer

from tests.appliance.server.http.image_models import wav
from tests.e2e.conftest import Appliance

ROOT = Path(__file__).resolve().parents[2]
SPECIALS = ("<s>", "[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[TRANSCRIBE]")
TEMPLATE = (
    "<s>{% for message in messages %}[INST]{% for part in message.content %}{% if part.type == 'audio' %}[BEGIN_AUDIO]"
    "[AUDIO]{% else %}{{ part.text }}{% endif %}{% endfor %}[/INST]{% endfor %}"
)
MANIFEST = """\
apiVersion: slipway/v2
model: {source: {path: model}, names: [ears], max_context: 256}
hardware: {device: cpu, threads: 1}
lifecycle: {self_test: {prompts: 0}}
"""
MELS, TOKENS = 16, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("voxtral")
    (base / "model").mkdir()
    backend = Tokenizer.from_file(str(ROOT / "manifests/demo/tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    backend.save(str(base / "model/tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (base / "model/tokenizer_config.json").write_text(json.dumps(config))
    extractor = transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=2)
    (base / "model/preprocessor_config.json").write_text(extractor.to_json_string())
    made = transformers.VoxtralConfig(
        audio_config={
            **{"num_mel_bins": MELS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"intermediate_size": 64, "max_source_positions": 100},
        },
        text_config={
            **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
            **{
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "vocab_size": backend.get_vocab_size(),
            },
            **{"max_position_embeddings": 512, "eos_token_id": backend.token_to_id("<|im_end|>"), "bos_token_id": None},
        },
        audio_token_id=backend.token_to_id("[AUDIO]"),
    )
    torch.manual_seed(4)
    model = transformers.VoxtralForConditionalGeneration(made).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
        for token in (*map(backend.token_to_id, SPECIALS), backend.token_to_id("<|im_end|>")):
            model.lm_head.weight[token] = 0  # replies are text
    model.save_pretrained(base / "model")
    (base / "m.yaml").write_text(MANIFEST)
    return base


def reference(folder: Path, data: bytes, prompt: str, tmp_path: Path) -> str:
    """Return the greedy text of transformers for a prompt with the tokens of one recording."""
    (tmp_path / "a.wav").write_bytes(data)
    samples = soundfile.read(tmp_path / "a.wav", dtype="float32")[0]
    extractor = transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=2)
    options = {"sampling_rate": 16_000, "padding": True, "truncation": False, "pad_to_multiple_of": 32_000}
    found = extractor(samples, return_tensors="pt", **options)["input_features"]
    features = found.reshape(MELS, -1, 200).transpose(0, 1)
    backend = Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    text = prompt.replace("[AUDIO]", "[AUDIO]" * (25 * len(features)))
    given = backend.encode(text, add_special_tokens=False).ids
    model = transformers.VoxtralForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32).eval()
    ids = torch.tensor([given])
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat((ids, model(input_ids=ids, input_features=features).logits[0, -1].argmax().view(1, 1)), 1)
    made: str = backend.decode(ids[0, len(given) :].tolist())
    return clean(made)


def clean(text: str) -> str:
    """Return a text without an incomplete character at its end, and without the spaces around it."""
    return text.rstrip("\ufffd").strip()


@pytest.mark.nightly("tests/e2e/test_speech.py::test_the_stream_is_the_transcript_of_the_json_reply")
@pytest.mark.slow
def test_transcripts_and_chat_equal_transformers(
    launch: Callable[..., Appliance], folder: Path, tmp_path: Path
) -> None:
    service = launch(folder / "m.yaml")
    service.wait_ready()
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none")
    short, long = wav(16_000), wav(70_001, seed=1)  # one window, three windows
    more: dict[str, Any] = {"extra_body": {"max_completion_tokens": TOKENS}}
    for data, language in ((short, None), (long, "German")):
        form = "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]" + ("lang:de" if language else "") + "[TRANSCRIBE]"
        wanted = reference(folder, data, form, tmp_path)
        given = {"file": ("a.wav", data), "model": "ears", **({"language": language} if language else {})}
        assert clean(client.audio.transcriptions.create(**given, **more).text) == wanted
        events = list(client.audio.transcriptions.create(**given, **more, stream=True))
        assert "".join(one.delta for one in events[:-1]) == events[-1].text
        assert clean(events[-1].text) == wanted
        assert events[-1].usage.seconds == (5 if language else 1)
    plain = client.audio.transcriptions.create(file=("a.wav", short), model="ears", response_format="text", **more)
    assert (
        plain.strip() == reference(folder, short, "<s>[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]", tmp_path).strip()
    )
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(short).decode(), "format": "wav"}}
    body = {"messages": [{"role": "user", "content": [audio, {"type": "text", "text": "What?"}]}], "temperature": 0}
    reply = service.client.post("/v1/chat/completions", json={**body, "max_tokens": TOKENS}).json()
    wanted = reference(folder, short, "<s>[INST][BEGIN_AUDIO][AUDIO]What?[/INST]", tmp_path)
    assert clean(reply["choices"][0]["message"]["content"]) == wanted
    for fields, what in (
        ({"response_format": "verbose_json"}, "requires timestamps"),
        ({"timestamp_granularities[]": "word"}, "no timestamps"),
        ({"prompt": "Slipway"}, "no prompt"),
        ({"language": "xx-unknown"}, "is not known"),
    ):
        refused = service.client.post("/v1/audio/transcriptions", data=fields, files={"file": ("a.wav", short)})
        assert refused.status_code == 400 and what in refused.json()["error"]["message"], refused.text
    translated = service.client.post("/v1/audio/translations", files={"file": ("a.wav", short)})
    assert translated.status_code == 400 and "does not translate" in translated.text
    metrics = service.client.get("/metrics").text
    (choices,) = re.findall(r"^slipway_request_params_n_sum\S* (\S+)$", metrics, re.MULTILINE)
    assert float(choices) == 6, "each request has one sequence"
    (line,) = [one for one in metrics.splitlines() if one.startswith("slipway_audio_seconds_total")]
    assert float(line.split()[-1]) == pytest.approx(2 * (1 + 70_001 / 16_000) + 1, abs=0.01)
