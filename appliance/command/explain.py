"""`slipway explain WORD`: a key, an exit code, a kind of problem, a rule, a variable, an error of the API."""

import difflib
import sys

from appliance import exits
from appliance.declare.codes import CODES
from appliance.declare.keys import keys, leaves
from appliance.explain.codes import tell_exit, tell_problem, tell_rule, tell_variable
from appliance.explain.keys import tell_key
from appliance.rules.rules import RULES


def explain(word: str) -> int:
    """Prints what the word stands for. Ends with the code of a wrong command line where it stands for nothing."""
    found = [text for look in (tell_key, tell_exit, tell_problem, tell_rule, tell_variable) if (text := look(word))]
    if found := found or _api_error(word):
        print("\n\n".join(found))
        return exits.OK.number
    print(f"slipway explain: {_unknown(word)}", file=sys.stderr)
    return exits.MANIFEST.number


def _api_error(word: str) -> list[str]:
    """Asked last: it loads the gateway's modules."""
    from appliance.explain.api import tell_error

    return [text for text in [tell_error(word)] if text]


def _unknown(word: str) -> str:
    """What to say of a word that stands for nothing, with those that are near."""
    named = word.removeprefix("--").replace("-", "_").lower()
    words: dict[str, str] = {key.name: key.name for key in keys().values() if "*" not in key.path}
    words |= {key.path[-1]: key.name for key in leaves()}
    words |= {name.replace("-", "_"): name for name in (*CODES, *(rule.name for rule in RULES))}
    words |= {one.name: one.name for one in exits.EXITS}
    near = list(dict.fromkeys(words[found] for found in difflib.get_close_matches(named, words, 3, 0.65)))
    hint = f"did you mean {' or '.join(near)}?" if near else "try slipway explain model, or an exit code such as 11"
    return f"{word}: no key, section, exit code, kind of problem, rule, variable or error of the API; {hint}"
