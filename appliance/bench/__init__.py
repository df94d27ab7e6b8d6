"""Load tests of OpenAI-compatible endpoints: `slipway bench`.

    workload ─▶ arrivals ─▶ run ─▶ client ─▶ Outcome ─▶ summary ─▶ text, JSON, HTML report

A workload is a list of sessions, each with one turn or more. It depends only on its options and the seed, so two
endpoints and two days get the same requests.
"""
