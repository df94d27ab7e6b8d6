"""`slipway explain WORD`: explain a key, an exit code, a cause of an engine's exit, an alert, a kind of problem, a
rule, a variable or an API error."""

import difflib
import sys

from appliance.cli.explanations.codes import (
    explain_alert,
    explain_cause,
    explain_exit,
    explain_problem,
    explain_rule,
    explain_variable,
)
from appliance.cli.explanations.keys import explain_key
from appliance.config import exits
from appliance.config.codes import CODES
from appliance.config.keys import keys, leaves
from appliance.constraints.rules import RULES
from appliance.observability.alerts import ALERTS
from appliance.supervisor.causes import CAUSES


def explain(word: str) -> int:
    """Print the meaning of the word. Return the code of a wrong command line if it has none."""
    explainers = (
        explain_key,
        explain_exit,
        explain_cause,
        explain_problem,
        explain_rule,
        explain_variable,
        explain_alert,
    )
    found = [text for look in explainers if (text := look(word))]
    if found := found or _api_error(word):
        print("\n\n".join(found))
        return exits.OK.number
    print(f"slipway explain: {_unknown(word)}", file=sys.stderr)
    return exits.MANIFEST.number


def _api_error(word: str) -> list[str]:
    """Return the API errors for a word. Called last, because it loads the gateway's modules."""
    from appliance.cli.explanations.api import explain_error

    return [text for text in [explain_error(word)] if text]


def _unknown(word: str) -> str:
    """Return the message for an unknown word, with similar words."""
    named = word.removeprefix("--").replace("-", "_").lower()
    words: dict[str, str] = {key.name: key.name for key in keys().values() if "*" not in key.path}
    words |= {key.path[-1]: key.name for key in leaves()}
    words |= {name.replace("-", "_"): name for name in (*CODES, *(rule.name for rule in RULES))}
    words |= {one.name: one.name for one in exits.EXITS}
    words |= {one.name.replace("-", "_"): one.name for one in CAUSES}
    words |= {alert.name.lower(): alert.name for alert in ALERTS}
    near = list(dict.fromkeys(words[found] for found in difflib.get_close_matches(named, words, 3, 0.65)))
    hint = f"did you mean {' or '.join(near)}?" if near else "try slipway explain model, or an exit code such as 11"
    kinds = "key, section, exit code, crash cause, alert, kind of problem, rule, variable or API error"
    return f"{word}: no {kinds}; {hint}"
