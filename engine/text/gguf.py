"""Tokenizer and chat templates in a GGUF file.

`tokenizer.ggml.model` is the algorithm. For `gpt2` (byte-level BPE), the file has tokens, merges and the name of the
pre-tokenization rule; they are converted to an equivalent tokenizer.json. `gemma4` is BPE of characters. For `llama`
(SentencePiece's BPE) and `t5` (SentencePiece's unigrams), it has pieces, scores and types; they are converted to a
SentencePiece model. `bert` (WordPiece) has tokens that begin with ▁ at the start of a word. Named tokens, added begin
and end tokens and the templates are converted to the contents of tokenizer_config.json.

Sources: ggml's description of GGUF; llama.cpp's convert_hf_to_gguf.py and llama-vocab.cpp, which define the names of
the rules; the tokenizer.json files of the models that the rules are named after.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.api.errors import CheckpointError
from engine.gguf.file import GgufFile, find_gguf, read_gguf
from engine.text.added import Added
from engine.text.backend import Backend
from engine.text.fast import FastTokenizer
from engine.text.ranks import PATTERN, QWEN_PATTERN
from engine.text.tekken import BYTE_LEVEL, pre_tokenizers

BPE, CHARACTERS, PIECES, UNIGRAMS, WORDS = "gpt2", "gemma4", "llama", "t5", "bert"
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type
_ADDED_SCORE = -1000.0  # score that llama.cpp's converter gives to tokens that are not in the SentencePiece model
_PREFIX = "tokenizer.ggml."
_CHARSMAP = f"{_PREFIX}precompiled_charsmap"  # how SentencePiece replaces characters
_TEMPLATE = "tokenizer.chat_template"
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "cls": "cls_token",
          "seperator": "sep_token"}  # fmt: skip
_ENDS_OF_WORDS = (("cls", "bos"), ("seperator", "eos"))  # names of the tokens before and after a text of WordPiece
_MARKS = r"\p{Lm}\p{Lo}\p{M}"
_TEKKEN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_MARKS}]*[\p{{Ll}}{_MARKS}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_MARKS}]+[\p{{Ll}}{_MARKS}]*",
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


@dataclass(frozen=True)
class _Rule:
    """Pre-tokenization of a kind of tokenizer."""

    pre_tokenizers: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    whole: bool = False
    """Keep a piece that is a token, without applying merges (ignore_merges)."""
    begins: bool = False
    """Add the begin token if the file does not specify it."""
    ends: bool = False
    """Add the end token if the file does not specify it."""


def _split(*patterns: str) -> tuple[dict[str, Any], ...]:
    """Return the pre-tokenizers that split a text by each pattern in turn and convert its bytes to characters."""
    parts = [pre_tokenizers(pattern) for pattern in patterns]
    return (*(part[0] for part in parts), parts[0][1])


_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PLAIN = _Rule((_GPT2,))
_CHARACTERS = _Rule(
    ({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},),
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    begins=True,
)
"""BPE of characters: ▁ is a space, and a character without a token becomes tokens of its bytes."""
_SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_OF_CHARACTERS = {"type": "Sequence", "decoders": [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]}
_SINGLE_DIGITS = _Rule(({"type": "Digits", "individual_digits": True}, _GPT2))
_LLAMA3 = _Rule(_split(PATTERN), whole=True, begins=True)
_QWEN2 = _Rule(_split(QWEN_PATTERN), {"type": "NFC"})
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT4O = _Rule(
    _split(
        "|".join(
            (
                rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_MARKS}]*[\p{{Ll}}{_MARKS}]+{_CONTRACTED}?",
                rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_MARKS}]+[\p{{Ll}}{_MARKS}]*{_CONTRACTED}?",
                r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            )
        )
    )
)
_DEEPSEEK_V3 = _Rule(
    _split(
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_QWEN3_5 = _Rule(
    _split(
        rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    {"type": "NFC"},
)
_SEED = _Rule(
    _split(
        rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
)
_BAILING = _Rule(
    _split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
)
_EXAONE_MOE = _Rule(
    _split(
        rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    )
)
RULES = {
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN,
    "exaone4": _PLAIN,
    "gigachat": _PLAIN,
    "a.x-4.0": _PLAIN,
    "trillion": _PLAIN,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _Rule(_split(PATTERN)),
    "smaug-bpe": _Rule(_split(PATTERN)),
    "chatglm-bpe": _Rule(_split(PATTERN)),
    "glm4": _Rule(_split(PATTERN), whole=True),
    "glm5": _Rule(_split(PATTERN), whole=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _Rule(_split(QWEN_PATTERN)),
    "stablelm2": _Rule(_split(QWEN_PATTERN)),
    "hunyuan": _Rule(_split(QWEN_PATTERN)),
    "solar-open": _Rule(_split(QWEN_PATTERN)),
    "grok-2": _Rule(_split(QWEN_PATTERN)),
    "qwen35": _QWEN3_5,
    "refact": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "exaone-moe": _EXAONE_MOE,
    "tekken": _Rule(_split(_TEKKEN), whole=True, begins=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "kanana2": _GPT4O,
    "minimax-m2": _GPT4O,
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "seed-coder": _SEED,
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "modern-bert": _Rule((_GPT2,), {"type": "NFC"}, begins=True, ends=True),
    "roberta-bpe": _Rule((_GPT2,), begins=True, ends=True),
}
"""Rules by tokenizer.ggml.pre."""


def gguf_tokenizer_file(checkpoint: Path) -> Path | None:
    """Return the GGUF file of a checkpoint if it contains a tokenizer. Raises CheckpointError."""
    path = find_gguf(checkpoint)
    return path if path is not None and f"{_PREFIX}tokens" in read_gguf(path).keys else None


def gguf_config(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json from the checkpoint's GGUF file, or {}."""
    path = find_gguf(checkpoint)
    if path is None:
        return {}
    file = read_gguf(path)
    tokens = file.keys.get(f"{_PREFIX}tokens", ())
    config: dict[str, Any] = {}
    for name, key in _NAMED.items():
        token = file.keys.get(f"{_PREFIX}{name}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            config[key] = tokens[token]
    if (template := file.keys.get(_TEMPLATE)) is not None:
        named = {key.removeprefix(f"{_TEMPLATE}."): text for key, text in _named_templates(file)}
        config["chat_template"] = {"default": template, **named} if named else template
    return config


def gguf_backend(path: Path, special: list[str]) -> Backend:
    """Return the tokenizer in a GGUF file. `special`: texts that are special tokens as well.

    Raises CheckpointError.
    """
    file, vocabulary = _checked(path)
    if file.keys[f"{_PREFIX}model"] in (BPE, CHARACTERS):
        return FastTokenizer(path, _bpe(file, vocabulary), [], special)
    if file.keys[f"{_PREFIX}model"] == WORDS:
        return FastTokenizer(path, _word_pieces(file, vocabulary), [], special)
    return _pieces(file, vocabulary, special)


def check_gguf_tokenizer(path: Path) -> None:
    """Raise CheckpointError unless the tokenizer in a GGUF file is supported and complete."""
    _checked(path)


def _checked(path: Path) -> tuple[GgufFile, "_Vocabulary"]:
    file = read_gguf(path)
    kind, vocabulary = file.require(f"{_PREFIX}model"), _vocabulary(file)
    cure = "Put the file into a folder with the tokenizer.json of the model it was made from"
    if kind not in (BPE, CHARACTERS, PIECES, UNIGRAMS, WORDS):
        known = f"{BPE}, {CHARACTERS}, {PIECES}, {UNIGRAMS} and {WORDS}"
        raise CheckpointError(f"{path}: {_PREFIX}model is {kind!r}; supported are {known}. {cure}")
    rule = file.keys.get(f"{_PREFIX}pre")
    if kind == BPE and rule not in RULES:
        raise CheckpointError(f"{path}: {_PREFIX}pre is {rule!r}, which is not a known pre-tokenizer. {cure}")
    if kind in (BPE, CHARACTERS) and not isinstance(file.require(f"{_PREFIX}merges"), tuple):
        raise CheckpointError(f"{path}: {_PREFIX}merges is not an array; copy the file again")
    if kind == WORDS:
        for first, *names in (*_ENDS_OF_WORDS, *([] if "[UNK]" in vocabulary.tokens else [("unknown",)])):
            if _token(file, vocabulary, first, *names) is None:
                raise CheckpointError(
                    f"{path}: lacks the key {_PREFIX}{first}_token_id, or no token has its number. {cure}"
                )
    octets = file.keys.get(_CHARSMAP, ())
    if not isinstance(octets, tuple) or not all(isinstance(octet, int) for octet in octets):
        raise CheckpointError(f"{path}: {_CHARSMAP} is not an array of bytes; copy the file again")
    return file, vocabulary


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens of the file."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]  # as in tokenizer.ggml.token_type
    scores: tuple[float, ...]  # of SentencePiece's pieces


def _vocabulary(file: GgufFile) -> _Vocabulary:
    tokens = file.require(f"{_PREFIX}tokens")
    count = len(tokens) if isinstance(tokens, tuple) else 0
    kinds = file.keys.get(f"{_PREFIX}token_type", (1,) * count)
    scores = file.keys.get(f"{_PREFIX}scores", (0.0,) * count)
    numbers = all(isinstance(part, tuple) and len(part) == count for part in (kinds, scores))
    if not count or not numbers or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(
            f"{file.path}: {_PREFIX}tokens, {_PREFIX}token_type and {_PREFIX}scores must be arrays of one length; "
            "copy the file again"
        )
    if len(set(tokens)) < count:
        twice = next(token for place, token in enumerate(tokens) if token in tokens[:place])
        raise CheckpointError(f"{file.path}: {_PREFIX}tokens has {twice!r} twice; convert the model again")
    return _Vocabulary(tokens, kinds, scores)


def _named_templates(file: GgufFile) -> Iterator[tuple[str, str]]:
    for key, value in file.keys.items():
        if key.startswith(f"{_TEMPLATE}.") and isinstance(value, str):
            yield key, value


def _ends(file: GgufFile, begins: bool, ends: bool = False) -> tuple[int | None, int | None]:
    """Return the tokens that are added before and after every text."""

    def token(name: str, default: bool) -> int | None:
        wanted = file.keys.get(f"{_PREFIX}add_{name}_token", default)
        found = file.keys.get(f"{_PREFIX}{name}_token_id")
        return found if wanted and isinstance(found, int) else None

    return token("bos", begins), token("eos", ends)


def _bpe(file: GgufFile, vocabulary: _Vocabulary) -> str:
    """Return the text of a tokenizer.json."""
    characters = file.keys[f"{_PREFIX}model"] == CHARACTERS
    rule = _CHARACTERS if characters else RULES[file.keys[f"{_PREFIX}pre"]]
    unknown = file.keys.get(f"{_PREFIX}unknown_token_id", -1)
    listed = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    added = [
        _added(token, text, kind == CONTROL)
        for token, (text, kind) in enumerate(listed)
        if kind in (CONTROL, USER_DEFINED)
    ]
    return msgspec.json.encode(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": rule.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": rule.pre_tokenizers},
            "post_processor": _around(vocabulary.tokens, *_ends(file, rule.begins, rule.ends)),
            "decoder": _OF_CHARACTERS if characters else BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "vocab": {text: token for token, (text, kind) in enumerate(listed) if kind != UNUSED},
                "merges": file.keys[f"{_PREFIX}merges"],
                "ignore_merges": rule.whole,
                "byte_fallback": characters,
                "fuse_unk": characters,
                "unk_token": vocabulary.tokens[unknown] if characters and 0 <= unknown < len(listed) else None,
            },
        }
    ).decode()


def _word_pieces(file: GgufFile, vocabulary: _Vocabulary) -> str:
    """Return the text of a tokenizer.json. Texts are in lower case unless the vocabulary has letters in upper case."""
    controls = [kind == CONTROL for kind in vocabulary.kinds]
    texts = [
        token if control else token[1:] if token.startswith("▁") else f"##{token}"
        for token, control in zip(vocabulary.tokens, controls, strict=True)
    ]
    words = (token.removeprefix("▁") for token, control in zip(vocabulary.tokens, controls, strict=True) if not control)
    cased = any(word.isalpha() and word != word.lower() for word in words)  # <S> of Chinese BERT is not a word
    first, last = (_token(file, vocabulary, *names) for names in _ENDS_OF_WORDS)
    unknown = _token(file, vocabulary, "unknown")
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    return msgspec.json.encode(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(token, texts[token], True) for token, control in enumerate(controls) if control],
            "normalizer": {**normalizer, "lowercase": not cased},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": _of_segments(texts, first, last),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]" if unknown is None else texts[unknown],
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {text: token for token, text in enumerate(texts)},
            },
        }
    ).decode()


def _token(file: GgufFile, vocabulary: _Vocabulary, *names: str) -> int | None:
    """Return the first of these named tokens that the file has."""
    ids = (file.keys.get(f"{_PREFIX}{name}_token_id") for name in names)
    return next((one for one in ids if isinstance(one, int) and 0 <= one < len(vocabulary.tokens)), None)


def _of_segments(texts: list[str], first: int | None, last: int | None) -> dict[str, Any]:
    """Return the post-processor of BERT: [CLS] A [SEP], or [CLS] A [SEP] B [SEP] with B in the second segment."""
    before = [] if first is None else [{"SpecialToken": {"id": texts[first], "type_id": 0}}]

    def part(name: str, number: int) -> list[dict[str, Any]]:
        end = [] if last is None else [{"SpecialToken": {"id": texts[last], "type_id": number}}]
        return [{"Sequence": {"id": name, "type_id": number}}, *end]

    known = {texts[token]: token for token in (first, last) if token is not None}
    return {
        "type": "TemplateProcessing",
        "single": [*before, *part("A", 0)],
        "pair": [*before, *part("A", 0), *part("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in known.items()},
    }


def _added(token: int, text: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": token, "content": text, **flags}


def _around(tokens: tuple[str, ...], begin: int | None, end: int | None) -> dict[str, Any] | None:
    """Return the post-processor that adds a begin and an end token to each text."""
    known = {tokens[token]: token for token in (begin, end) if token is not None}
    if not known:
        return None

    def one(name: str, number: int) -> list[dict[str, Any]]:
        before, behind = (
            [] if token is None else [{"SpecialToken": {"id": tokens[token], "type_id": number}}]
            for token in (begin, end)
        )
        return [*before, {"Sequence": {"id": name, "type_id": number}}, *behind]

    return {
        "type": "TemplateProcessing",
        "single": one("A", 0),
        "pair": [*one("A", 0), *one("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in known.items()},
    }


def _pieces(file: GgufFile, vocabulary: _Vocabulary, special: list[str]) -> Backend:
    """Return a SentencePiece tokenizer. A space is prepended to each part between added tokens, as in llama.cpp and in
    the tokenizer.json of Llama 2 and Mistral."""
    from engine.text.pieces import SentencePieceTokenizer, model_of

    added = []
    for token, (text, kind, score) in enumerate(
        zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)
    ):
        if kind in (CONTROL, UNKNOWN) or text in special:
            added.append(Added(token, text))
        elif kind == USER_DEFINED and score == _ADDED_SCORE:
            added.append(Added(token, text, special=False))
    unigrams = file.keys[f"{_PREFIX}model"] == UNIGRAMS
    begin, end = _ends(file, not unigrams, unigrams)
    hidden = {token.id for token in added if not token.special}
    model = model_of(file.path, _proto(file, vocabulary, hidden))
    return SentencePieceTokenizer(model, added, begin, end, legacy=True)


def _proto(file: GgufFile, vocabulary: _Vocabulary, hidden: set[int]) -> bytes:
    """Return SentencePiece's ModelProto. `hidden`: added tokens, which SentencePiece must not produce itself.

    Field numbers: sentencepiece_model.proto.
    """
    pieces = b"".join(
        _field(1, _field(1, text.encode()) + _float(2, score) + _number(3, UNUSED if token in hidden else kind))
        for token, (text, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)
        )
    )
    ids = [file.keys.get(f"{_PREFIX}{name}_token_id") for name in ("unknown", "bos", "eos")]
    named = b"".join(
        _number(40 + place, token) + _field(45 + place, vocabulary.tokens[token].encode())
        for place, token in enumerate(ids)
        if isinstance(token, int) and 0 <= token < len(vocabulary.tokens)
    )
    trainer = (
        _number(3, 1 if file.keys[f"{_PREFIX}model"] == UNIGRAMS else 2)
        + _number(35, int(any(kind == 6 for kind in vocabulary.kinds)))
        + named
    )
    normalizer = (
        _field(1, b"identity")
        + _field(2, bytes(octet & 0xFF for octet in file.keys.get(_CHARSMAP, ())))
        + _number(3, int(file.keys.get(f"{_PREFIX}add_space_prefix", True)))
        + _number(4, int(file.keys.get(f"{_PREFIX}remove_extra_whitespaces", False)))
    )
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
