"""Accuracy of OpenAI-compatible endpoints: `slipway eval`.

    file ─▶ samples ─▶ prompts ─▶ client ─▶ scoring ─▶ Record ─▶ summary, comparison ─▶ text, JSON, JSON lines

The samples of a task depend only on its file, its options and the seed, so two endpoints and two days get the same
prompts. `appliance.bench` provides the HTTP client and the closed loop.
"""
