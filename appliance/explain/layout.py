"""Labelled paragraphs, as `slipway explain` prints them."""

import textwrap

WIDTH = 100
_LABEL = 11


def field(label: str, text: str) -> str:
    lead = f"  {label:<{_LABEL}}"
    return filled(text, lead, " " * len(lead))


def filled(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
