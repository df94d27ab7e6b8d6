"""Labelled paragraphs for `slipway explain`."""

import textwrap

WIDTH = 100
_LABEL = 11


def lead(label: str) -> str:
    return f"  {label:<{_LABEL}}"


def field(label: str, text: str) -> str:
    return filled(text, lead(label), lead(""))


def filled(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
