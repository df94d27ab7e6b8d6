"""The real application over a router with scripted replies: submits are recorded, tests supply the deltas."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from appliance.config.gateway import GatewayConfig, with_values
from appliance.observability.log import RequestLog
from appliance.observability.metrics import Metrics
from appliance.server.app import build_app
from appliance.server.chat.text import load_text
from appliance.server.http.service import Service
from appliance.server.routing.adapters import AdapterRegistry
from appliance.server.routing.placement import ANYWHERE, Placement
from appliance.server.routing.router import Load
from engine.api.messages import Delta, Logprob, Sampling, Submit, Timing

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call functions. Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Answer with <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'forbidden' %}{{ raise_exception('no such role here') }}{% endif %}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
CORPUS = [
    TEMPLATE,
    "The answer is 42, isn't it? hello world stop END 中文 emoji 🎉 family 👩‍👩‍👧",
    '{"city": "Oslo"}',
] * 4


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the text files of a Qwen-like model."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\p{N}|\s?\p{L}+|[^\s\p{L}\p{N}]+|\s+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=specials)
    )
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    backend.add_tokens([AddedToken(text, normalized=False) for text in markers])
    directory = tmp_path_factory.mktemp("qwen")
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


class ScriptedGeneration:
    """One sequence: plays its deltas. With `hold`, waits after the last delta until it is closed."""

    def __init__(self, deltas: list[Delta], hold: bool, failure: Exception | None) -> None:
        self._deltas = deltas
        self._hold = hold
        self._failure = failure
        self.closed = False
        self.stopped = False

    async def __aenter__(self) -> "ScriptedGeneration":
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.closed = True

    def stop(self) -> None:
        self.stopped = True

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            await asyncio.sleep(0)
            yield delta
        if self._failure is not None:
            raise self._failure
        if self._hold:
            await asyncio.Event().wait()


class ScriptedRouter:
    """Replaces the router: `reply` makes the deltas of a Submit."""

    serves = answers = True

    def __init__(self) -> None:
        self.reply: Callable[[Submit], list[Delta]] = lambda submit: []
        self.adapters = AdapterRegistry(())
        self.hold = False
        self.failure: Exception | None = None
        self.submits: list[Submit] = []
        self.placements: list[Placement] = []
        self.generations: list[ScriptedGeneration] = []

    def load(self) -> Load:
        return Load(0.25, 3)

    def reconfigure(self, config: GatewayConfig) -> None:
        """Ignore the configuration: replies are scripted."""

    def generate_all(self, submits: Sequence[Submit], where: Placement = ANYWHERE) -> list[ScriptedGeneration]:
        self.submits += submits
        self.placements.append(where)
        made = [ScriptedGeneration(self.reply(submit), self.hold, self.failure) for submit in submits]
        self.generations += made
        return made


def scored(token: int, sampling: Sampling, vocab: int, rank: int) -> Logprob:
    """Return a token with its likely ones, or with the requested ones: scores -1, -2, … in their order."""
    assert sampling.logprobs is not None
    found = entry(token, sampling.logprobs, vocab, rank)
    if not (named := sampling.logprob_ids):
        return found
    return msgspec.structs.replace(found, top_ids=named, top_logprobs=tuple(-1.0 - at for at in range(len(named))))


def entry(token: int, count: int, vocab: int, rank: int = 1) -> Logprob:
    """Return a synthetic score: the most likely tokens are the token itself, or its neighbours if rank > 1."""
    first = token if rank == 1 else token + 1
    top = [(first + index) % vocab for index in range(count if count >= 0 else vocab)]
    scores = [-0.5 * (index + 1) for index in range(len(top))]
    return Logprob(token, -0.5 if rank == 1 else -7.25, rank, tuple(top), tuple(scores))


class Gateway:
    """The application and its script. `post` returns status and JSON, `stream` the records of a stream."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.router = ScriptedRouter()
        self.service = Service(config, self.router, Metrics(config), RequestLog(config))  # type: ignore[arg-type]
        self.service.set_text(load_text(config))
        self.app = build_app(self.service)
        self.tokenizer = self.service.tokenizer
        self.rank = 1

    @property
    def submits(self) -> list[Submit]:
        return self.router.submits

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def says(self, *texts: str, finish: str = "stop", each: int = 1, **counts: int) -> "Gateway":
        """Reply with these texts, one per choice in turn, in deltas of `each` tokens; "stop" adds the end token.
        counts: fields of Timing."""
        given = iter(range(10**9))

        def reply(submit: Submit) -> list[Delta]:
            ids = self.ids(texts[next(given) % len(texts)])
            ids += [self.tokenizer.eos_id or 0] * (finish == "stop")
            return self.deltas(submit, ids, finish, each, counts)

        self.router.reply = reply
        return self

    def gives(self, ids: list[int], finish: str = "length", each: int = 1, reason: int | None = None) -> "Gateway":
        """Reply with exactly these ids."""
        self.router.reply = lambda submit: self.deltas(submit, ids, finish, each, {}, reason)
        return self

    def deltas(
        self,
        submit: Submit,
        ids: list[int],
        finish: str,
        each: int,
        counts: Mapping[str, int],
        reason: int | None = None,
    ) -> list[Delta]:
        sampling, vocab = submit.sampling, self.config.vocab_size
        cuts = [ids[at : at + each] for at in range(0, len(ids), each)] or [[]]
        deltas = []
        for at, cut in enumerate(cuts):
            last = at == len(cuts) - 1
            count = sampling.logprobs
            deltas.append(
                Delta(
                    submit.id,
                    tuple(cut),
                    () if count is None else tuple(scored(token, sampling, vocab, self.rank) for token in cut),
                    finish=finish if last else None,  # type: ignore[arg-type]
                    stop_reason=reason if last else None,
                    timing=Timing(**counts) if last else None,
                )
            )
        if (asked := sampling.prompt_logprobs) is not None:
            scores = [None, *(entry(token, asked, vocab, self.rank) for token in submit.prompt[1:])]
            deltas[0] = msgspec.structs.replace(deltas[0], prompt_logprobs=tuple(scores))
        return deltas

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway", timeout=60)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async def call() -> httpx.Response:
            async with self.client() as client:
                return await client.post(path, json=body, headers=headers)

        reply = asyncio.run(call())
        return reply.status_code, reply.json()

    def lines(self, path: str, body: Any) -> list[str]:
        """Return the raw records of a stream."""

        async def call() -> httpx.Response:
            async with self.client() as client:
                return await client.post(path, json={**body, "stream": True})

        reply = asyncio.run(call())
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.text.endswith("\n\n")
        return reply.text.split("\n\n")[:-1]

    def stream(self, path: str, body: Any) -> list[Any]:
        """Return the records of a stream without the terminator; fail if it is missing."""
        lines = self.lines(path, body)
        assert lines[-1] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def openai(self, work: Callable[[openai.AsyncOpenAI], Any]) -> Any:
        """Run `work` with the official client over this application."""

        async def call() -> Any:
            async with self.client() as http:
                return await work(openai.AsyncOpenAI(api_key="none", base_url="http://gateway/v1", http_client=http))

        return asyncio.run(call())


@pytest.fixture
def make_gateway(checkpoint: Path) -> Iterator[Callable[..., Gateway]]:
    made: list[Gateway] = []

    def make(**fields: Any) -> Gateway:
        defaults: dict[str, Any] = {
            "names": ("qwen", "alias"),
            "model": str(checkpoint),
            "engines": (),
            "max_context": 256,
            "vocab_size": 420,
            "version": "1",
        }
        values = {"endpoints.host": "127.0.0.1", "endpoints.port": 0, "endpoints.compat": "vllm", **fields}
        made.append(Gateway(with_values(GatewayConfig(**defaults), values)))
        return made[-1]

    yield make
    for gateway in made:
        gateway.service.grammars.close()


@pytest.fixture
def gateway(make_gateway: Callable[..., Gateway]) -> Gateway:
    return make_gateway()
