"""Token ids of the served speech model."""

from dataclasses import dataclass
from functools import cached_property

from appliance.config.gateway import SpeechModel
from appliance.server.speech.languages import LANGUAGES
from engine.api.errors import CheckpointError
from engine.text import Tokenizer


@dataclass(frozen=True)
class SpeechTokens:
    """Special tokens of a speech model. They have the same names in all checkpoints."""

    tokenizer: Tokenizer
    model: SpeechModel

    def _id(self, name: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        if found is None:
            raise CheckpointError(f"the tokenizer has no token <|{name}|>, which speech recognition needs")
        return found

    @cached_property
    def start(self) -> int:
        return self._id("startoftranscript")

    @cached_property
    def end(self) -> int:
        return self._id("endoftext")

    @cached_property
    def no_timestamps(self) -> int:
        return self._id("notimestamps")

    @cached_property
    def previous(self) -> int:
        return self._id("startofprev")

    @cached_property
    def no_speech(self) -> int | None:
        found = (self.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("nospeech", "nocaptions"))
        return next((one for one in found if one is not None), None)

    @cached_property
    def zero(self) -> int:
        """The timestamp 0, which follows no_timestamps; some tokenizers have no text for timestamps."""
        return self.no_timestamps + 1

    def task(self, name: str) -> int:
        return self._id(name)

    @cached_property
    def languages(self) -> dict[str, int]:
        """Ids of the languages by code; empty for a model of English alone."""
        if not self.model.multilingual:
            return {}
        found = {code: self.tokenizer.convert_tokens_to_ids(f"<|{code}|>") for code in LANGUAGES}
        return {code: token for code, token in found.items() if token is not None}

    def is_text(self, token: int) -> bool:
        return token < self.end
