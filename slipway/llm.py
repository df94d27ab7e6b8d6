"""`LLM` with chat templates and the tasks of pooling models.

The functions of the HTTP routes parse the requests, so a service has the same prompts, errors and results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from appliance.config.gateway import GatewayConfig
from appliance.config.sections.endpoints import Endpoints
from appliance.config.sections.limits import Limits
from appliance.planning.output_format import model_type
from appliance.planning.pooled import pooled_model, tasks_of
from appliance.server.chat.conversation import Text, render
from appliance.server.chat.parsed import Served
from appliance.server.chat.text import load_text
from appliance.server.pooling.embeddings import plan_classes, plan_embeddings
from appliance.server.pooling.plan import PoolPlan
from appliance.server.pooling.scores import plan_scores
from appliance.server.pooling.vectors import floats
from appliance.server.schema.chat import ChatRequest
from appliance.server.schema.pooling import ClassifyRequest, EmbeddingRequest
from appliance.server.schema.scoring import ScoreRequest
from engine import llm
from engine.api.errors import RequestError
from engine.api.messages import Pooled, Sampling
from engine.llm import Generation, Params
from engine.models.checkpoint import read_checkpoint

Messages = Sequence[Mapping[str, Any]]
Schema = TypeVar("Schema", bound=BaseModel)
UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class Classification:
    """Classes of one text."""

    label: str | None
    """Label of the most likely class, if the checkpoint names it."""
    probabilities: list[float]


class LLM(llm.LLM):
    """A loaded checkpoint; see `engine.llm.LLM` for its arguments and `generate`."""

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: Params | Sampling | Sequence[Params | Sampling] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Generation]:
        """Return the reply to each conversation, a list of messages. The texts contain reasoning and tool calls as the
        model writes them. chat_template: name or source of a template, by default the template of the checkpoint."""
        each = [conversations] if conversations and isinstance(conversations[0], Mapping) else list(conversations)
        fields = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        prompts = []
        for messages in each:
            copies = [dict(one) if isinstance(one, Mapping) else one for one in messages]
            body = _parsed(ChatRequest, {"messages": copies, **given})
            rendered = render(body, self._text, self._gateway, {})
            prompts.append(self._text.tokenizer.encode(rendered.text, add_special_tokens=False))
        return self.generate(prompts, params)

    def embed(
        self, input: str | Sequence[str] | Sequence[Sequence[int]], *, dimensions: int | None = None, **fields: Any
    ) -> list[list[float]]:
        """Return the vector of each text or list of token ids. `fields`: of /v1/embeddings, such as `input_type`."""
        body = _parsed(EmbeddingRequest, {"input": input, "dimensions": dimensions, **fields})
        return [floats(one) for one in self._pooled(plan_embeddings(body, self._served))]

    def classify(self, input: str | Sequence[str], **fields: Any) -> list[Classification]:
        """Return the classes of each text. `fields`: of /classify, such as `use_activation`."""
        body = _parsed(ClassifyRequest, {"input": input, **fields})
        labels = () if self._gateway.pooled is None else self._gateway.pooled.labels
        found = []
        for values in map(floats, self._pooled(plan_classes(body, self._served))):
            best = max(range(len(values)), key=values.__getitem__)
            found.append(Classification(labels[best] if best < len(labels) else None, values))
        return found

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str], **fields: Any) -> list[float]:
        """Return the score of each pair: one query and all documents, or as many queries as documents. `fields`: of
        /score, such as `instruction`."""
        body = _parsed(ScoreRequest, {"queries": queries, "documents": documents, **fields})
        self._need("score")
        plan = plan_scores(body, self._served)
        return plan.scores(self._vectors(plan), self._gateway)

    def _pooled(self, plan: PoolPlan) -> Sequence[Pooled]:
        return plan.joined(self._vectors(plan))

    def _vectors(self, plan: PoolPlan) -> list[Pooled]:
        """Return the result of each sequence of a plan."""
        task = plan.submits[0].pooling
        assert task is not None, "plans of pooling routes have a task"
        self._need(task.task)
        segments = [submit.segments for submit in plan.submits]
        arrays = self.pool([submit.prompt for submit in plan.submits], task, segments)
        return [Pooled(array.shape, array.tobytes()) for array in arrays]

    def _need(self, task: str) -> None:
        """Raise RequestError if the model does not serve a task."""
        if task not in self._gateway.tasks:
            raise RequestError(f"this model does not serve {task}; it serves {', '.join(self._gateway.tasks)}", None)

    @cached_property
    def _gateway(self) -> GatewayConfig:
        """Configuration with which the gateway would parse requests for this model, without its limits."""
        own = self.config.model
        checkpoint = read_checkpoint(own.path, own.trust_remote_code, task=own.task)
        return GatewayConfig(
            names=(Path(own.path).name,),
            model=own.path,
            engines=(),
            max_context=own.max_context,
            vocab_size=self.vocab,
            eos_token_ids=checkpoint.eos_token_ids,
            tasks=tasks_of(checkpoint),
            pooled=pooled_model(checkpoint),
            model_type=model_type(checkpoint),
            limits=Limits(max_prompts=UNLIMITED),
            endpoints=Endpoints(trust_request_chat_template=True),
        )

    @cached_property
    def _text(self) -> Text:
        return load_text(self._gateway)

    @property
    def _served(self) -> Served:
        return Served(self._text, self._gateway, "offline")


def _parsed(schema: type[Schema], fields: Mapping[str, Any]) -> Schema:
    """Return a body. Raise RequestError that names the argument."""
    try:
        return schema.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise RequestError(f"{name}: {first['msg']}" if name else first["msg"], name or None) from None
