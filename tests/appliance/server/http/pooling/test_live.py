"""Pooling through a live gateway and real frames: metrics, admission, an engine that crashes."""

import threading

from appliance.config.gateway import PooledModel

URL = "/v1/embeddings"
# The fake text side has no tokenizer, so prompts are ids and the truncation side is explicit.
BODY = {"input": [[1, 2, 3], [4, 5], [6, 7, 8, 9]], "truncation_side": "right"}
VECTORS = [[3, 1, 3], [2, 4, 5], [4, 6, 9]]
MODEL = {"tasks": ("embed",), "pooled": PooledModel(width=3)}


def vectors(reply) -> list[list[float]]:
    assert reply.status_code == 200, reply.text
    return [one["embedding"] for one in reply.json()["data"]]


def test_a_batch_counts_as_its_sequences(start_gateway, engine):
    """ME-03 sequences count singly; POOL-02"""
    gateway = start_gateway(engine, **MODEL)
    assert vectors(gateway.client.post(URL, json=BODY)) == VECTORS
    assert gateway.metric("slipway_requests_total", finished_reason="stop") == 3
    assert gateway.metric("slipway_prompt_tokens_total") == 9
    assert gateway.metric("slipway_request_duration_seconds_count") == 3
    assert gateway.metric("slipway_request_prefill_time_seconds_count") == 3
    assert gateway.metric("slipway_request_decode_time_seconds_count") == 0
    assert gateway.metric("slipway_generation_tokens_total") == 0


def test_a_full_queue_refuses_a_batch_whole(start_gateway, engine, eventually):
    """ER-13 admission counts every input"""
    engine.holding = True
    gateway = start_gateway(engine, **MODEL, **{"limits.max_waiting": 3})
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(gateway.client.post(URL, json=BODY)))
    waiting.start()
    eventually("all inputs wait", lambda: gateway.service.router.waiting == 3)
    refused = gateway.client.post(URL, json=BODY)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    engine.give()
    waiting.join()
    assert vectors(replies[0]) == VECTORS and len(engine.submits) == 3


def test_pooling_survives_an_engine_crash(start_gateway, engine, new_engine, eventually):
    engine.holding = True
    gateway = start_gateway(engine, **MODEL)
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(gateway.client.post(URL, json=BODY)))
    waiting.start()
    eventually("the engine has them", lambda: len(engine.submits) == 3)
    engine.die()
    engine.holding = False
    engine.start()
    waiting.join()
    assert vectors(replies[0]) == VECTORS
    assert gateway.metric("slipway_request_interruptions_total") == 3
