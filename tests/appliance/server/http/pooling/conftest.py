"""Gateways of pooling models: a BERT-like tokenizer, and a toy model called by the scripted router."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from appliance.config.gateway import PooledModel
from tests.appliance.server.http.conftest import CORPUS, Gateway
from tests.appliance.server.http.pooling.model import LABELS, WIDTH, answer

TALK = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def save_bert(directory: Path) -> Path:
    """Write the text files of a BERT-like model: [CLS] a [SEP] b [SEP], the second text of token type 1."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials))
    marks = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, marks)
    backend.save(str(directory / "tokenizer.json"))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TALK, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


Make = Callable[..., Gateway]


@pytest.fixture
def make_pooling(make_gateway: Callable[..., Gateway], bert: Path) -> Make:
    """`tasks`, and any setting of PooledModel and GatewayConfig."""

    def make(*tasks: str, labels: int = len(LABELS), cached: int = 0, **fields: Any) -> Gateway:
        known = set(PooledModel.__struct_fields__)
        model: dict[str, Any] = {"width": WIDTH, "labels": LABELS[:labels], "activation": "normalize"}
        model |= {name: value for name, value in fields.items() if name in known}
        config = {name: value for name, value in fields.items() if name not in known}
        config = {"model": str(bert), "max_context": 32, "tasks": tasks, "pooled": PooledModel(**model)} | config
        gateway = make_gateway(**config)
        gateway.router.reply = lambda submit: answer(submit, labels, cached)
        return gateway

    return make


@pytest.fixture
def embedder(make_pooling: Make) -> Gateway:
    return make_pooling("embed", "token_embed", "score")
