"""Structured output: a language the reply must stay in, as masks of the tokens that may come next. Free of torch."""
