"""JSON objects from prose: fields, types and values are named in a sentence, in the order they shall have."""

import json
import random
from typing import Any

from tools.demo.sample import Sample, ask, draw, listed
from tools.demo.vocabulary import city, date, email, invented, name, phrase, word, words_of

STRINGS = {
    "name": name, "title": phrase, "city": city, "country": city, "color": word, "author": name, "email": email,
    "date": date, "street": city, "product": phrase, "animal": word, "language": word, "status": word,
    "owner": name, "subject": phrase, "category": word, "brand": invented, "user": name, "code": invented,
    "team": word, "label": word, "text": phrase, "first_name": name, "last_name": name, "birthday": date,
    "species": word, "fruit": word, "key": invented, "model": invented, "message": phrase,
}  # fmt: skip
INTEGERS = words_of("""
age count year pages quantity size score level port floor rooms seats weight height width length points rank id
number items minutes hours stock temperature
""")
NUMBERS = words_of("""
price rating distance ratio speed cost latitude longitude amount balance total
""")
BOOLEANS = words_of("""
active available open ready admin valid visible enabled urgent paid public member done is_new in_stock
""")
LISTS = words_of("""
tags colors words names cities items_list animals labels letters friends
""")
KINDS = ("string", "string", "string", "integer", "integer", "number", "boolean", "list")

FIELD = (
    '{f} ({t}) {v}', '{f} ({t}): {v}', '{f}, {a} {t}, is {v}', 'the {t} {f} is {v}', '{f} ({t}) = {v}',
    '{a} {t} {f} with the value {v}', '{f} {v} ({t})', '{f} of type {t} with value {v}',
)  # fmt: skip
PLAIN = ("{f} {v}", "{f} is {v}", "{f}: {v}", "{f} = {v}")
REQUEST = (
    "Return a JSON object with {l}.", "Give me a JSON object with these fields: {l}.", "Write JSON with {l}.",
    "Make a JSON object: {l}.", "Answer with a JSON object that has {l}.", "Create a JSON object with {l}.",
    "JSON object with {l}", "I need a JSON object with {l}.", "Please write a JSON object with the fields {l}.",
    "Fill this schema as JSON: {l}.", "Output JSON: {l}", "Produce a JSON object where {l}.",
    "Reply only with JSON. Fields: {l}.", "Generate JSON for {l}.",
    "Emit a JSON object with the following fields: {l}.",
)  # fmt: skip
SPLIT = (
    "Schema: {s}. Values: {l}. Write the JSON object.",
    "Write a JSON object. The fields are {s}. The values are {l}.", "The schema has {s}. Fill it with {l}.",
    "Return JSON with the fields {s}. Use {l}.", "JSON schema: {s}. Data: {l}.",
)  # fmt: skip


def _value(rng: random.Random, kind: str, field: str) -> Any:
    if kind == "string":
        return STRINGS[field](rng)
    if kind == "integer":
        return rng.randrange(-20, 10) if rng.random() < 0.1 else rng.randrange(10 ** rng.randint(1, 4))
    if kind == "number":
        return round(rng.uniform(-10, 500), rng.randint(1, 2))
    if kind == "boolean":
        return rng.random() < 0.5
    return (
        [word(rng) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.7
        else [rng.randrange(100) for _ in range(rng.randint(1, 4))]
    )


def _field(rng: random.Random, kind: str) -> str:
    return rng.choice(
        {"string": list(STRINGS), "integer": INTEGERS, "number": NUMBERS, "boolean": BOOLEANS, "list": LISTS}[kind]
    )


def _said(rng: random.Random, value: Any, quoted: bool) -> str:
    """A value as prose has it: strings with or without quotes, lists with `and`."""
    if isinstance(value, str):
        return f'"{value}"' if quoted else value
    if isinstance(value, list):
        return json.dumps(value) if quoted else listed([str(item) for item in value])
    return json.dumps(value)


def _type(kind: str, value: Any) -> str:
    if kind == "list":
        return "list of strings" if isinstance(value[0], str) else "list of integers"
    return kind


def _object(rng: random.Random) -> Sample:
    fields: dict[str, tuple[str, Any]] = {}
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5))):
        kind = rng.choice(KINDS)
        field = _field(rng, kind)
        fields[field] = (kind, _value(rng, kind, field))
    values = {field: value for field, (_, value) in fields.items()}
    unquoted_list = any(isinstance(v, list) for v in values.values())
    quoted = unquoted_list or rng.random() < 0.5
    types = {field: _type(kind, value) for field, (kind, value) in fields.items()}
    plain = [rng.choice(PLAIN)] * len(fields)
    if rng.random() < 0.25:
        schema = listed([f"{f} ({t})" for f, t in types.items()])
        said = listed([plain[0].format(f=f, v=_said(rng, v, quoted)) for f, v in values.items()])
        text = rng.choice(SPLIT).format(s=schema, l=said)
    else:
        form = rng.choice(FIELD) if rng.random() < 0.75 else plain[0]
        said = [
            form.format(f=f, t=types[f], a="an" if types[f][0] == "i" else "a", v=_said(rng, v, quoted))
            for f, v in values.items()
        ]
        text = rng.choice(REQUEST).format(l=listed(said) if rng.random() < 0.7 else ", ".join(said))
    problem = json.dumps(values)
    return Sample("json", problem, ask(text), problem, f"The fields are {listed(list(values))}.")


def objects(rng: random.Random, held_out: bool) -> Sample:
    """One described object."""
    return draw(lambda: _object(rng), held_out)
