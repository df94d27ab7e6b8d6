"""KServe: its first protocol, the Open Inference Protocol, the prefix /openai; and health routes of NVIDIA NIM."""

import json

import pytest

TENSOR = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["Hello", "One two"]}
PARAMETERS = {"max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def texts(client):
    """Return the texts of /v1/completions for TENSOR."""
    body = {"prompt": TENSOR["data"], **PARAMETERS}
    return [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]


def test_ks_01_the_root_is_alive_for_programs(anyone):
    assert anyone.get("/", headers={"accept": "application/json"}).json() == {"status": "alive"}
    assert anyone.get("/", headers={"accept": "text/html"}).text.lstrip().startswith("<!")


@pytest.mark.parametrize("prefix", ["/v1/health", "/v2/health"])
def test_ks_10_health_needs_no_key(anyone, prefix):
    assert anyone.get(f"{prefix}/live").status_code == anyone.get(f"{prefix}/ready").status_code == 200


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_ks_10_ks_12_the_model_is_ready_and_described(client, model, version):
    assert client.get(f"/v2/models/{model}{version}/ready").json() == {"name": model, "ready": True}
    about = client.get(f"/v2/models/{model}{version}").json()
    assert (about["name"], about["versions"], about["inputs"][0]["datatype"]) == (model, ["1"], "BYTES")
    assert model in client.get("/v2/models").json()["models"]


def test_ks_11_the_server_is_described(client):
    assert set(client.get("/v2").json()) == {"name", "version", "extensions"}


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_ks_13_tensors_are_inferred_and_the_id_is_repeated(client, model, texts, version):
    body = {"id": "42", "inputs": [TENSOR], "parameters": PARAMETERS}
    reply = client.post(f"/v2/models/{model}{version}/infer", json=body)
    assert reply.status_code == 200, reply.text
    (output,) = reply.json()["outputs"]
    assert (reply.json()["id"], output["shape"], output["datatype"]) == ("42", [2], "BYTES") and output["data"] == texts


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": []},
        {"inputs": [{**TENSOR, "shape": [3]}]},
        {"inputs": [{**TENSOR, "data": [1, 2]}]},
        {"inputs": [{**TENSOR, "datatype": "FP32"}]},
        {"inputs": [TENSOR, TENSOR]},
        {"inputs": [TENSOR], "outputs": [{"name": "absent"}]},
        {"inputs": [TENSOR], "parameters": {"stream": True}},
        {"inputs": [TENSOR], "parameters": {"max_tokens": -1}},
    ],
)
def test_ks_14_a_wrong_tensor_is_400_with_the_protocols_error(client, model, body):
    reply = client.post(f"/v2/models/{model}/infer", json=body)
    assert reply.status_code == 400 and isinstance(reply.json()["error"], str), reply.text


def test_ks_14_unknown_models_and_versions_are_404(client, model):
    for path in ("/v2/models/absent", f"/v2/models/{model}/versions/2", f"/v2/models/{model}/versions/2/ready"):
        reply = client.get(path)
        assert reply.status_code == 404 and isinstance(reply.json()["error"], str)
    assert client.post("/v2/models/absent/infer", json={"inputs": [TENSOR]}).status_code == 404
    assert client.post("/v1/models/absent:predict", json={"instances": ["x"]}).status_code == 404


def test_ks_generate_returns_the_text_and_a_stream_its_parts(client, model, texts):
    body = {"text_input": "Hello", "parameters": PARAMETERS}
    whole = client.post(f"/v2/models/{model}/generate", json=body).json()
    assert (whole["model_name"], whole["model_version"], whole["text_output"]) == (model, "1", texts[0])
    stream = client.post(f"/v2/models/{model}/generate_stream", json=body)
    assert stream.headers["content-type"].startswith("text/event-stream")
    parts = [json.loads(line.removeprefix("data: ")) for line in stream.text.splitlines() if line.startswith("data")]
    assert "".join(part["text_output"] for part in parts) == texts[0] and parts[-1]["details"]["finish_reason"]


def test_ks_first_protocol_predicts(client, model, texts):
    body = {"instances": TENSOR["data"], "parameters": PARAMETERS}
    predictions = client.post(f"/v1/models/{model}:predict", json=body).json()["predictions"]
    assert [one["choices"][0]["text"] for one in predictions] == texts


def test_ks_16_openais_routes_have_the_prefix_too(client, model):
    assert client.get("/openai/v1/models").json() == client.get("/v1/models").json()
    assert client.get(f"/openai/v1/models/{model}").status_code == 200
    reply = client.post("/openai/v1/completions", json={"prompt": "Hello", **PARAMETERS})
    assert reply.status_code == 200
    assert client.get("/openai/health").status_code == client.get("/openai/openai/v1/models").status_code == 404


def test_ks_every_route_of_inference_needs_a_key(anyone, model):
    for path, body in (
        (f"/v2/models/{model}/infer", {"inputs": [TENSOR]}),
        (f"/v2/models/{model}/generate", {"text_input": "x"}),
        (f"/v2/models/{model}/generate_stream", {"text_input": "x"}),
        (f"/v1/models/{model}:predict", {"instances": ["x"]}),
        ("/openai/v1/completions", {"prompt": "x"}),
    ):
        assert anyone.post(path, json=body).status_code == 401, path
    for path in ("/v2", "/v2/models", f"/v2/models/{model}", f"/v2/models/{model}/ready", "/openai/v1/models"):
        assert anyone.get(path).status_code == 401, path


def test_ks_02_metrics_count_a_route_and_not_its_model(client, anyone, model):
    client.get(f"/v2/models/{model}")
    text = anyone.get("/metrics").text
    assert 'handler="/v2/models/{name:path}"' in text and f'handler="/v2/models/{model}' not in text
