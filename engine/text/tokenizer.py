"""A checkpoint's tokenizer: text to ids as transformers gives them, ids to text, and what each id stands for.

Reads tokenizer.json (the `tokenizers` library) or Mistral's tekken.json, tokenizer_config.json,
special_tokens_map.json and chat_template.jinja.
Begin and end tokens come from the post-processor of tokenizer.json alone: transformers, too, drops add_bos_token and
add_eos_token of tokenizer_config.json where a tokenizer.json lies beside it.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.api.errors import CheckpointError
from engine.text.tekken import NAMED, TEKKEN, tekken_text
from engine.text.vocabulary import Vocabulary, read_vocabulary

FILES = ("tokenizer.json", TEKKEN)
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object; copy the checkpoint again")
    return value


def tokenizer_file(directory: Path) -> Path:
    """The file that a directory's tokenizer is read from: tokenizer.json, or else tekken.json. Raises CheckpointError
    if it has neither."""
    found = next((directory / name for name in FILES if (directory / name).is_file()), None)
    if found is None:
        raise CheckpointError(
            f"{directory / FILES[0]}: no such file, and no {TEKKEN}; model.source must hold one of them "
            "(AutoTokenizer's save_pretrained writes a tokenizer.json)"
        )
    return found


def tokenizer_text(directory: Path) -> str:
    """The directory's tokenizer as the text of a tokenizer.json. Raises CheckpointError naming the file."""
    path = tokenizer_file(directory)
    if path.name == TEKKEN:
        return tekken_text(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as text ({error}); copy the checkpoint again") from error


def _load_backend(directory: Path) -> Backend:
    text, path = tokenizer_text(directory), tokenizer_file(directory)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises plain Exception for every kind of damage
        raise CheckpointError(f"{path}: is no tokenizer ({error}); copy the checkpoint again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _content(token: Any) -> str | None:
    """The text of a token as configurations spell it: a string, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _read_templates(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja and additional_chat_templates/ win over tokenizer_config.json, as in transformers."""
    single = directory / "chat_template.jinja"
    more = {file.stem: file.read_text() for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if single.is_file():
        text = single.read_text(encoding="utf-8")
        return {"default": text, **more} if more else text
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template


def shared(lengths: list[int], room: int) -> list[int]:
    """How much of two lengths goes into `room`: the shorter keeps up to half of it, the longer has the rest."""
    if sum(lengths) <= room:
        return lengths
    short = 0 if lengths[0] <= lengths[1] else 1
    kept = [0, 0]
    kept[short] = min(lengths[short], room // 2)
    kept[1 - short] = room - kept[short]
    return kept


def chat_templates(directory: Path) -> str | dict[str, str] | None:
    """The directory's chat template, or its templates by name. Raises CheckpointError naming the file."""
    return _read_templates(directory, _read_json(directory / "tokenizer_config.json"))


class Tokenizer:
    """The tokenizer in a checkpoint's directory. Raises CheckpointError naming the file that is missing or damaged."""

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        config = _read_json(directory / "tokenizer_config.json")
        named = _read_json(directory / "special_tokens_map.json") | config
        self._backend = _load_backend(directory)
        if tokenizer_file(directory).name == TEKKEN:  # such a checkpoint has no tokenizer_config.json
            named = {key: text for key, text in NAMED.items() if self._backend.token_to_id(text) is not None} | named
        self.special_tokens = {key: text for key in _NAMED if (text := _content(named.get(key)))}
        self._add_tokens(config, named)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.truncation_side = "left" if config.get("truncation_side") == "left" else "right"
        self.chat_template = _read_templates(directory, config)

    def _add_tokens(self, config: dict[str, Any], named: dict[str, Any]) -> None:
        """Tokens that only tokenizer_config.json knows, and the named ones as special."""
        for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if self._backend.token_to_id(entry["content"]) is None:
                fields = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
                self._backend.add_tokens([AddedToken(entry["content"], special=entry.get("special", False), **fields)])
        known = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        extra = named.get("additional_special_tokens") or named.get("extra_special_tokens") or []
        extra_texts = [_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
        texts = [*self.special_tokens.values(), *(text for text in extra_texts if text)]
        self._backend.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in texts if text not in known]
        )

    def _named_id(self, key: str) -> int | None:
        text = self.special_tokens.get(key)
        return None if text is None else self._backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_within(
        self, text: str, limit: int, *, side: Literal["left", "right"] = "right", add_special_tokens: bool = True
    ) -> list[int]:
        """At most `limit` ids: what is too long is cut on `side`, and the special tokens stay around the rest."""
        encoded = self._backend.encode(text, add_special_tokens=False)
        special = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoded.truncate(max(0, limit - special), direction=side)
        return list(self._backend.post_process(encoded, None, add_special_tokens).ids)

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        limit: int | None = None,
        most: tuple[int | None, int | None] = (None, None),
        side: Literal["left", "right"] = "right",
    ) -> tuple[list[int], list[int]]:
        """Two texts as the tokenizer joins them: ids, and the token type of each. `most` ids of either text; and of all
        at most `limit`, for which the longer one gives way until both are as long (transformers' longest_first)."""
        one, other = (self._backend.encode(text, add_special_tokens=False) for text in (first, second))
        for encoded, count in zip((one, other), most, strict=True):
            if count is not None:
                encoded.truncate(count, direction=side)
        if limit is not None:
            room = max(0, limit - self._backend.num_special_tokens_to_add(True))
            for encoded, count in zip((one, other), shared([len(one.ids), len(other.ids)], room), strict=True):
                encoded.truncate(count, direction=side)
        joined = self._backend.post_process(one, other, True)
        return list(joined.ids), list(joined.type_ids)

    def decode(self, ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._backend, json.loads(self._backend.to_str())["decoder"])

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token; the model's logits may be more."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @cached_property
    def longest_piece(self) -> int:
        """Most characters one token stands for: a text of more than n times that many has more than n tokens."""
        return max((len(text) for text in self._backend.get_vocab(with_added_tokens=True)), default=1)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; b"" for an id without a token."""
        return self.vocabulary.bytes_of(token)

    def token_string(self, token: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id without one."""
        return self._backend.id_to_token(token)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | None | list[int | None]:
        """The id of a token by its spelling (None: no such token), or a list of them for a list."""
        if isinstance(tokens, str):
            return self._backend.token_to_id(tokens)
        return [self._backend.token_to_id(token) for token in tokens]
