"""Streaming decoder of the text of a custom tool's call from its JSON arguments."""

import json


class JsonString:
    """Decoder of the first value of a JSON object, a string, piece by piece. Later members and other input produce no
    text."""

    def __init__(self) -> None:
        self._quotes = 0  # quotes seen outside of escapes: two around the name, two around the value
        self._held = ""  # an incomplete escape

    def feed(self, text: str) -> str:
        found = ""
        for character in text:
            if len(self._held) == 6 and character != "\\":  # half of a surrogate pair without the other half
                found += self._taken()
            if len(self._held) == 11 and self._is_first_half(self._held[6:] + character):  # also half of a pair
                held, self._held = self._held[6:], self._held[:6]
                found += self._taken()
                self._held = held
            if self._held or (character == "\\" and self._quotes in (1, 3)):
                self._held += character
                if self._is_whole(self._held):
                    found += self._taken()
            elif character == '"':
                self._quotes += 1
            elif self._quotes == 3:
                found += character
        return found

    @staticmethod
    def _is_first_half(escape: str) -> bool:
        return escape[:2] == "\\u" and escape[2:4].lower() in ("d8", "d9", "da", "db")

    @staticmethod
    def _is_whole(escape: str) -> bool:
        if len(escape) < 2 or escape[1] != "u":
            return len(escape) == 2
        if len(escape) < 6:
            return False
        if JsonString._is_first_half(escape[:6]):
            return len(escape) == 12 or not "\\u".startswith(escape[6:8])
        return True

    def _taken(self) -> str:
        text, self._held = self._decoded(), ""
        return text if self._quotes == 3 else ""

    def _decoded(self) -> str:
        try:
            text = str(json.loads(f'"{self._held}"'))
        except ValueError:
            text = self._held
        return text.encode("utf-8", "replace").decode()
