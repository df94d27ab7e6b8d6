"""Routes of OpenAI's API, and the routes that vLLM adds to it."""
