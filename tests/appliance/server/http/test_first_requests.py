"""Warm-up requests that each engine must answer before the service is ready, over a scripted router."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from appliance.config.gateway import EncoderLimits
from appliance.security.keys import parse_keys
from appliance.server.errors.api import EngineFailed, Unavailable
from appliance.server.first_requests import Unanswered, answer_each, ask_each_kind, kinds
from engine.api.errors import EngineGone, StepError
from tests.appliance.server.http.conftest import Gateway
from tests.appliance.server.http.pooling.conftest import bert, make_pooling  # noqa: F401

Make = Callable[..., Gateway]


def ask(gateway: Gateway, engine: int = 0) -> bool:
    return asyncio.run(ask_each_kind(gateway.service, gateway.app.router, engine))


def test_a_chat_model_answers_a_completion_and_a_conversation_on_the_engine(gateway: Gateway) -> None:
    gateway.says("42")
    assert ask(gateway, engine=3)
    assert list(kinds(gateway.service)) == ["/v1/completions", "/v1/chat/completions"]
    assert [submit.sampling.temperature for submit in gateway.submits] == [1.0, 1.0]
    assert [submit.max_tokens for submit in gateway.submits] == [2, 2]
    assert gateway.tokenizer.decode(gateway.submits[1].prompt).startswith("user\nHello")
    assert [each.engine_index for each in gateway.router.placements] == [3, 3]


def counted(gateway: Gateway) -> list[str]:
    lines = gateway.service.metrics.render()[0].decode().splitlines()
    return [line for line in lines if not line.startswith(("process_", "python_"))]


def test_first_requests_need_no_key_and_are_in_no_metric_and_no_log(
    make_gateway: Make, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = make_gateway(**{"observability.log_requests": True, "observability.log_outputs": "final"}).says("42")
    gateway.service.set_keys(parse_keys(["secret name=a"], "keys"))
    before = counted(gateway)
    with caplog.at_level("INFO"):
        assert ask(gateway)
    assert counted(gateway) == before
    assert caplog.text == ""


def test_a_template_that_wants_a_system_message_gets_one(make_gateway: Make, tmp_path) -> None:  # type: ignore[no-untyped-def]
    own = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}{{ messages[1].content }}"
    )
    (tmp_path / "own.jinja").write_text(own)
    gateway = make_gateway(chat_template=str(tmp_path / "own.jinja")).says("42")
    assert ask(gateway)
    assert len(gateway.submits) == 2


def test_a_model_may_refuse_the_conversation(
    make_gateway: Make,
    tmp_path,
    caplog: pytest.LogCaptureFixture,  # type: ignore[no-untyped-def]
) -> None:
    (tmp_path / "own.jinja").write_text("{{ raise_exception('only tools') }}")
    gateway = make_gateway(chat_template=str(tmp_path / "own.jinja")).says("42")
    assert ask(gateway)
    assert "test request to POST /v1/chat/completions" in caplog.text and "only tools" in caplog.text


@pytest.mark.parametrize(
    ("tasks", "paths"),
    [
        (("embed",), ["/v1/embeddings"]),
        (("classify",), ["/classify"]),
        (("score",), ["/score"]),
        (("token_embed",), ["/pooling#token_embed"]),
        (("token_classify",), ["/pooling#token_classify"]),
        (("embed", "token_embed"), ["/v1/embeddings", "/pooling#token_embed"]),
    ],
)
def test_each_task_of_a_pooling_model_is_asked_for(make_pooling: Make, tasks: list[str], paths: list[str]) -> None:  # noqa: F811
    gateway = make_pooling(*tasks, **({"labels": 1} if "score" in tasks else {}))
    assert list(kinds(gateway.service)) == paths
    assert ask(gateway) and len(gateway.submits) >= len(paths)


def test_an_encoder_decoder_model_is_asked_for_a_completion_alone(make_gateway: Make) -> None:
    gateway = make_gateway(encoder=EncoderLimits(decoder_start_ids=(2,), max_input=64, reply=64))
    assert list(kinds(gateway.service)) == ["/v1/completions"]


def broken(message: str) -> EngineFailed:
    error = EngineFailed()
    error.__cause__ = StepError(message)
    return error


def test_errors_of_every_request_are_reported(gateway: Gateway) -> None:
    gateway.router.failure = broken("the model computed NaN")
    with pytest.raises(Unanswered, match=r"POST /v1/completions failed: the model computed NaN"):
        ask(gateway)
    gateway.router.failure = KeyError("text")  # a fault of the gateway's own
    with pytest.raises(Unanswered, match=r"POST /v1/completions failed: Internal server error"):
        ask(gateway)


@pytest.mark.parametrize("failure", [EngineFailed(), EngineGone("gone"), Unavailable("busy", 1)])
def test_transient_errors_are_retried(gateway: Gateway, failure: Exception) -> None:
    gateway.router.failure = failure
    assert not ask(gateway)


@dataclass
class FakeEngine:
    index: int
    serves: bool = True
    answers: bool = False
    label: str = field(default="0")


def test_each_engine_gets_first_requests_once_and_again_after_a_restart(gateway: Gateway) -> None:
    engines = [FakeEngine(0), FakeEngine(1, serves=False)]
    gateway.router.engines = engines  # type: ignore[attr-defined]
    gateway.says("42")
    ranks = lambda: [each.engine_index for each in gateway.router.placements]  # noqa: E731

    async def run() -> list[str]:
        failures: list[str] = []
        task = asyncio.create_task(answer_each(gateway.service, gateway.app.router, failures.append))

        async def until(check: Callable[[], bool]) -> None:
            async with asyncio.timeout(100):
                while not check():
                    await asyncio.sleep(0.01)

        await until(lambda: engines[0].answers)
        assert ranks() == [0, 0]
        engines[1].serves = True
        await until(lambda: engines[1].answers)
        assert ranks() == [0, 0, 1, 1]
        engines[0].answers = False  # as the router says after a swap
        gateway.router.failure = broken("NaN")
        await until(task.done)
        return failures

    assert asyncio.run(run()) == ["checkpoint: engine 0: POST /v1/completions failed: NaN"]
