"""Whisper's rules for the tokens of a transcript.

A reply begins with given tokens: the language, the task, and no_timestamps for text without timestamps. With
timestamps, text is between pairs of them:

- The first token is a timestamp, at most `latest_first`.
- After a timestamp that ends a segment, another one or the end follows; after one that begins a segment, text.
- Timestamps never decrease, and a segment does not end where it began.
- If all timestamps together are more probable than every other token, one of them is sampled.

Source: Whisper's reference implementation (decoding.py: SuppressBlank, SuppressTokens, ApplyTimestampRules),
transformers generation/logits_process.py (WhisperTimeStampLogitsProcessor).

These rules apply before logprobs are computed, as in the reference implementation; the choice of the first tokens
applies after them, so that their logprobs tell the probabilities of all languages and of no speech.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.api.messages import SpeechRules
from engine.sampling.rows import LogitProcessor, Rows


def speech_begin(rows: Rows) -> LogitProcessor | None:
    """Restrict the first tokens of replies to `begin`."""
    users = {}
    for row, rules, reply in _replies(rows):
        if len(reply) < len(rules.begin):
            users[row] = torch.tensor(rules.begin[len(reply)], device=rows.device)
    if not users:
        return None

    def process(logits: Tensor) -> None:
        for row, allowed in users.items():
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept

    return process


def speech_rules(rows: Rows) -> LogitProcessor | None:
    """Apply the rules for the tokens after `begin`."""
    users = [
        (row, rules, reply[len(rules.begin) :])
        for row, rules, reply in _replies(rows)
        if len(reply) >= len(rules.begin)
    ]
    if not users:
        return None

    def process(logits: Tensor) -> None:
        for row, rules, transcript in users:
            apply_rules(logits[row], rules, transcript)

    return process


def _replies(rows: Rows) -> list[tuple[int, SpeechRules, Sequence[int]]]:
    found = []
    for row in rows.using(rows.columns.speech):
        slot = int(rows.slots[row])
        reply = rows.tokens[slot, int(rows.columns.prompt_tokens[slot]) : int(rows.lengths[row])].tolist()
        found.append((row, rows.columns.speech[slot], reply))
    return found


def apply_rules(logits: Tensor, rules: SpeechRules, transcript: Sequence[int]) -> None:
    """Mask the logits [vocab] of the token after `transcript`."""
    logits[list(rules.suppressed)] = -torch.inf
    if not transcript:
        logits[list(rules.suppressed_first)] = -torch.inf
    zero = rules.timestamps
    if zero is None:
        return
    if rules.no_timestamps is not None:
        logits[rules.no_timestamps] = -torch.inf
    last = bool(transcript) and transcript[-1] >= zero
    before = len(transcript) < 2 or transcript[-2] >= zero
    if last and before:
        logits[zero:] = -torch.inf
    elif last:
        logits[: rules.end] = -torch.inf
    times = [token for token in transcript if token >= zero]
    if times:
        # A segment may begin where the last one ended; it ends later than it began.
        logits[zero : times[-1] + (0 if last and not before else 1)] = -torch.inf
    if not transcript:
        logits[:zero] = -torch.inf
        if rules.latest_first is not None:
            logits[zero + rules.latest_first + 1 :] = -torch.inf
    if logits[zero:].logsumexp(0) > logits[:zero].max():
        logits[:zero] = -torch.inf
