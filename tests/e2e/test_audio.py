"""Audio in chat through the running service: replies equal those of transformers.

The model is a small Qwen2-Audio with random weights and the tokenizer of the demo.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile
import torch
import transformers

from tests.appliance.server.http.image_models import wav, write
from tests.e2e.conftest import Appliance
from tests.e2e.hostile_media import check_hostile_files

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 16
MANIFEST = """\
apiVersion: slipway/v2
model: {source: {path: model}, names: [ears], max_context: 512}
hardware: {device: cpu, threads: 1}
lifecycle: {self_test: {prompts: 0}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("audio")
    (base / "model").mkdir()
    write("qwen2_audio", ROOT / "manifests/demo", base / "model")
    written = json.loads((base / "model/tokenizer.json").read_text())
    ids = {one["content"]: one["id"] for one in written["added_tokens"]}
    vocab = 1 + max(*ids.values(), *written["model"]["vocab"].values())
    config = transformers.Qwen2AudioConfig(
        audio_config={
            **{"num_mel_bins": 16, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 40, "max_source_positions": 200},
        },
        text_config={
            **{"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab},
            **{"max_position_embeddings": 512, "eos_token_id": ids["<|im_end|>"], "bos_token_id": None},
        },
        audio_token_index=ids["<|AUDIO|>"],
    )
    torch.manual_seed(4)
    model = transformers.Qwen2AudioForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
        for token in ids.values():
            model.lm_head.weight[token] = 0  # replies are text
    model.save_pretrained(base / "model")
    (base / "m.yaml").write_text(MANIFEST)
    return base


@pytest.fixture(scope="module")
def service(launch: Callable[..., Appliance], folder: Path) -> Appliance:
    appliance = launch(folder / "m.yaml")
    appliance.wait_ready()
    return appliance


@pytest.mark.nightly("tests/appliance/media/test_loader.py::test_damaged_videos_and_audio_fail_only_their_request")
@pytest.mark.parametrize("count", (24, 1000))
def test_hostile_audio_gets_an_error_or_a_reply(service: Appliance, count: int) -> None:
    """FUZZ_SEED selects other files."""
    check_hostile_files(service, "ears", count, ("audio_url",))


@pytest.mark.nightly("tests/engine/test_audio_media.py::test_replies_equal_those_of_transformers")
def test_replies_equal_transformers(service: Appliance, folder: Path, tmp_path: Path) -> None:
    """Two clips of several lengths in one prompt."""
    files = [wav(16_000), wav(9_001, seed=1)]
    parts = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
        for data in files
    ]
    body = {
        **{"model": "ears", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]},
        **{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True},
    }
    found = service.client.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    reply = found.json()
    samples = []
    for number, data in enumerate(files):
        (tmp_path / f"{number}.wav").write_bytes(data)
        samples.append(soundfile.read(tmp_path / f"{number}.wav", dtype="float32")[0])
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=4)
    given = extractor(
        samples, sampling_rate=16_000, return_attention_mask=True, padding="max_length", return_tensors="pt"
    )
    model = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32)
    prompt = reply["prompt_token_ids"]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model.eval()(
                input_ids=ids,
                input_features=given["input_features"],
                feature_attention_mask=given["attention_mask"],
            ).logits
            ids = torch.cat((ids, logits[0, -1].argmax().view(1, 1)), 1)
    assert reply["choices"][0]["token_ids"] == ids[0, len(prompt) :].tolist()
