"""SentencePiece's tokenizer.model, with the settings of Hugging Face's configuration files.

A text is split at added tokens, and SentencePiece tokenizes the parts between them. Its dummy space is prepended only
to
the entire text, or to each part if the configuration has `legacy: true`, as in transformers.
"""

import sys
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import TOKENIZER_BYTES, read_file
from engine.text.added import Added
from engine.text.plain import PlainTokenizer

_SPACE = "▁"
# ModelProto.normalizer_spec.add_dummy_prefix = false: appended to a serialized model, it overrides the model's setting.
_NO_DUMMY_SPACE = bytes((0x1A, 0x02, 0x18, 0x00))


class SentencePieceTokenizer(PlainTokenizer):
    """A SentencePiece tokenizer. `model`: the library's processor."""

    def __init__(self, model: Any, added: list[Added], begin: int | None, end: int | None, *, legacy: bool) -> None:
        super().__init__(added, begin, end)
        self._model = model
        self._bare = _without_dummy_space(self._model)
        self._rest = self._model if legacy else self._bare
        # A normaliser that collapses white space removes all of it at a text's start, else only the dummy space.
        tidies = self._model.normalize("a  a") == self._model.normalize("a a")
        self.strip = sys.maxsize if tidies else int(self._model.normalize("a").startswith(_SPACE))
        size = self._model.get_piece_size()
        self.base_special = frozenset(
            token for token in range(size) if self._model.is_control(token) or self._model.is_unknown(token)
        )
        # Without byte tokens, any number of characters without a piece become one unknown token.
        self.bounded = any(self._model.is_byte(token) for token in range(size))

    def tokenize(self, text: str, *, first: bool) -> list[int]:
        # A lone surrogate is not valid text; it is encoded like invalid bytes.
        text = text.encode("utf-8", "replace").decode()
        return list((self._model if first else self._rest).encode(text))

    def bare(self, text: str) -> list[int]:
        return list(self._bare.encode(text))

    def base_names(self) -> dict[str, int]:
        return {self._model.id_to_piece(token): token for token in range(self._model.get_piece_size())}

    def base_pieces(self) -> list[bytes]:
        return [self._piece(token) for token in range(self._model.get_piece_size())]

    def _piece(self, token: int) -> bytes:
        text = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            return bytes((int(text[3:-1], 16),))
        return str(text).replace(_SPACE, " ").encode()


def read_model(path: Path) -> Any:
    """Return the library's processor of a file. Raises CheckpointError."""
    try:
        return model_of(path, read_file(path, TOKENIZER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; copy the checkpoint again") from error


def model_of(path: Path, data: bytes) -> Any:
    """Return the library's processor of a serialized model. `path`: its origin. Raises CheckpointError."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise CheckpointError(f"{path}: needs the package sentencepiece, which is not installed") from error
    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
        return model
    except RuntimeError as error:
        raise CheckpointError(f"{path}: is not a SentencePiece model ({error}); copy the checkpoint again") from error


def _without_dummy_space(model: Any) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=model.serialized_model_proto() + _NO_DUMMY_SPACE)
