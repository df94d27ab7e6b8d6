"""API errors in the formats of OpenAI and Anthropic."""
