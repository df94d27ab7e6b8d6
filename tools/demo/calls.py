"""Tool calls: the right one of one to four offered functions, its arguments, and the answer after its result."""

import json
import random
from dataclasses import replace
from typing import Any

from tools.demo import arithmetic
from tools.demo.sample import Message, Sample, ask, draw, is_held_out
from tools.demo.vocabulary import city, date, email, invented, name, phrase, word, words_of

Tool = dict[str, Any]
Request = tuple[Tool, str, dict[str, Any], Any]  # tool, words, arguments, result
VERBS = words_of("""
create delete find book send open close start stop list update cancel check order share rename move copy print show
read save load search track remove record play rate archive approve
""")
NOUNS = words_of("""
invoice meeting flight room ticket report file folder order customer message alarm song playlist photo task note
event contact account package taxi hotel table document server user product recipe article lesson printer camera
door lamp window train calendar channel backup video book garden robot project account contract
""")
PARAMETERS = {
    "name": name, "title": phrase, "city": city, "date": date, "email": email, "customer": name, "color": word,
    "location": city, "topic": word, "owner": name, "label": word, "code": invented, "recipient": name,
    "text": phrase, "category": word, "target": word, "count": None, "amount": None, "size": None, "id": None,
    "minutes": None, "year": None, "level": None, "limit": None, "price": None, "weight": None, "urgent": None,
    "public": None, "confirm": None,
}  # fmt: skip
NUMBERS, BOOLEANS = ("price", "weight"), ("urgent", "public", "confirm")
ASKING = (
    "{r}.", "{r}", "Please {l}.", "Can you {l}?", "I need you to {l}.", "Could you {l}?", "please {l}",
    "{r} please.", "I want to {l}.", "Now {l}.",
)  # fmt: skip
WEATHER = (
    "What is the weather in {c}?", "How is the weather in {c} today?", "Weather in {c}", "How warm is it in {c}?",
    "What's the weather like in {c}?", "Tell me the weather in {c}.", "Is it raining in {c}?",
    "Get the weather for {c}.", "What is the weather in {c} right now?",
)  # fmt: skip
REFUSAL = "None of the offered tools can do that."


def _tool(label: str, description: str, properties: dict[str, Any], *, required: bool = True) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = list(properties)
    function = {"name": label, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v}}


def _call(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool["function"]["name"], "arguments": arguments}


def _weather(rng: random.Random) -> Request:
    place = city(rng)
    question = rng.choice(WEATHER)
    label = rng.choice(("get_weather", "get_weather", "get_weather", "weather", "get_current_weather"))
    parameter = rng.choice(("city", "city", "city", "location"))
    description = rng.choice(
        ("Get the weather of a city", "Get the current weather", "Current weather in a city", "Get current weather", "")
    )
    result = {
        "temperature": rng.randint(-9, 38),
        "condition": rng.choice(("sunny", "rainy", "cloudy", "windy", "snowy", "clear")),
    }
    properties: dict[str, Any] = {parameter: _string(rng, "Name of the city")}
    arguments, unit = {parameter: place}, rng.choice(("celsius", "fahrenheit"))
    if rng.random() < 0.25:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.6:
            return (
                _tool(label, description, properties),
                f"What is the weather in {place} in {unit}?",
                {**arguments, "unit": unit},
                result,
            )
        tool = _tool(label, description, properties)
        tool["function"]["parameters"]["required"] = [parameter]
        return tool, question.format(c=place), arguments, result
    return (
        _tool(label, description, properties, required=rng.random() < 0.8),
        question.format(c=place),
        arguments,
        result,
    )


def _string(rng: random.Random, description: str) -> dict[str, Any]:
    return {"type": "string", "description": description} if rng.random() < 0.4 else {"type": "string"}


def _sum(rng: random.Random) -> Request:
    a, b, sign = arithmetic.problem(rng, held_out=False)
    question = rng.choice(arithmetic.ADD if sign == "+" else arithmetic.SUBTRACT).format(a=a, b=b)
    if question == f"Add {b} to {a}.":
        question = f"Add {a} and {b}."
    kind = rng.choice(("number", "integer"))
    x, y = rng.choice((("a", "b"), ("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")))
    label = "add" if sign == "+" else "subtract"
    about = {
        "add": ("Add two numbers", "Add two integers", "Adds a and b", ""),
        "subtract": ("Subtract two numbers", "Subtract b from a", ""),
    }
    description = rng.choice(about[label])
    return (
        _tool(label, description, {x: {"type": kind}, y: {"type": kind}}),
        question,
        {x: a, y: b},
        arithmetic.result(a, b, sign),
    )


def _product(rng: random.Random) -> Request:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    question = rng.choice(
        (
            "What is {a} times {b}?",
            "Multiply {a} by {b}.",
            "Multiply {a} and {b}",
            "What is {a} * {b}?",
            "{a} times {b}",
        )
    )
    tool = _tool(
        "multiply", rng.choice(("Multiply two numbers", "")), {"a": {"type": "number"}, "b": {"type": "number"}}
    )
    return tool, question.format(a=a, b=b), {"a": a, "b": b}, a * b


def _time(rng: random.Random) -> Request:
    place = city(rng)
    question = rng.choice(
        ("What time is it in {c}?", "Tell me the time in {c}.", "What is the time in {c}?", "Time in {c}?")
    )
    tool = _tool(
        "get_time",
        rng.choice(("Get the time in a city", "Current time of a city", "")),
        {"city": _string(rng, "Name of the city")},
    )
    return tool, question.format(c=place), {"city": place}, {"time": f"{rng.randint(10, 23)}:{rng.randint(10, 59)}"}


def _search(rng: random.Random) -> Request:
    query = phrase(rng)
    question = rng.choice(
        ("Search for {q}.", 'Search the web for "{q}".', "Look up {q}.", "Search {q}", 'Find pages about "{q}".')
    )
    label = rng.choice(("search", "web_search", "search_web"))
    tool = _tool(
        label, rng.choice(("Search the web", "Search for a query", "")), {"query": _string(rng, "What to search for")}
    )
    return tool, question.format(q=query), {"query": query}, {"title": phrase(rng)}


def _timer(rng: random.Random) -> Request:
    minutes = rng.randint(1, 120)
    question = rng.choice(
        (
            "Set a timer for {m} minutes.",
            "Start a timer of {m} minutes.",
            "Timer for {m} minutes",
            "Wake me in {m} minutes.",
        )
    )
    tool = _tool("set_timer", rng.choice(("Set a timer", "Start a timer", "")), {"minutes": {"type": "integer"}})
    return tool, question.format(m=minutes), {"minutes": minutes}, {"status": "ok"}


def _argument(rng: random.Random, parameter: str) -> tuple[str, Any]:
    if parameter in NUMBERS:
        return "number", round(rng.uniform(1, 300), 1)
    if parameter in BOOLEANS:
        return "boolean", rng.random() < 0.5
    make = PARAMETERS[parameter]
    return ("string", make(rng)) if make else ("integer", rng.randrange(10 ** rng.randint(1, 4)))


def _generic(rng: random.Random) -> Request:
    """A function named verb_noun with up to three parameters, and a request that names verb, noun and values."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    parameters = rng.sample(list(PARAMETERS), rng.choice((1, 1, 2, 2, 3)))
    arguments, properties = {}, {}
    for parameter in parameters:
        kind, arguments[parameter] = _argument(rng, parameter)
        properties[parameter] = {"type": kind}
    quoted = rng.random() < 0.4
    between = rng.choice((" ", " ", " = ", ": "))
    said = [f"{k}{between}{_said(v, quoted)}" for k, v in arguments.items()]
    what = f"{verb} {'an' if noun[0] in 'aeiou' else 'a'} {noun}"
    request = f"{what} {rng.choice(('with', 'with', 'using', 'for'))} {' and '.join(said)}"
    text = rng.choice(ASKING).format(r=request[0].upper() + request[1:], l=request)
    description = f"{what.capitalize()}" if rng.random() < 0.6 else ""
    result: dict[str, Any] = {rng.choice(("id", "number", "count")): rng.randrange(1000)} if rng.random() < 0.5 else {}
    result["status"] = rng.choice(("ok", "done", "failed"))
    return _tool(f"{verb}_{noun}", description, properties, required=rng.random() < 0.7), text, arguments, result


def _said(value: Any, quoted: bool) -> str:
    return (f'"{value}"' if quoted else value) if isinstance(value, str) else json.dumps(value)


FIXED = (_weather, _sum, _product, _time, _search, _timer)


def _request(rng: random.Random) -> Request:
    return rng.choice((_weather, *FIXED))(rng) if rng.random() < 0.4 else _generic(rng)


def _offer(rng: random.Random, wanted: list[Tool], others: int) -> tuple[Tool, ...]:
    """The wanted tools among others of different names, shuffled."""
    tools = list(wanted)
    while len(tools) < len(wanted) + others:
        other = _request(rng)[0]
        if not any(_alike(other, tool) for tool in tools):
            tools.append(other)
    rng.shuffle(tools)
    return tuple(tools)


def _alike(one: Tool, other: Tool) -> bool:
    """Return true if a request could mean both: equal names, or one kind, such as `weather` and `get_weather`."""
    words = [set(tool["function"]["name"].split("_")) - {"get", "current", "set", "web"} for tool in (one, other)]
    return words[0] <= words[1] or words[1] <= words[0]


def _others(rng: random.Random) -> int:
    return rng.choices((0, 1, 2, 3), (4, 3, 2, 1))[0]


def written(call: dict[str, Any]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def spoken(result: Any) -> str:
    """The answer after a tool's result."""
    if isinstance(result, dict):
        return ", ".join(f"{key}: {value}" for key, value in result.items())
    return f"The result is {result}."


def _called(request: Request, tools: tuple[Tool, ...]) -> Sample:
    tool, text, arguments, _ = request
    called = _call(tool, arguments)
    return Sample("call", json.dumps(called), ask(text), written(called), f"The tool {called['name']} fits.", tools)


def _answered(request: Request, tools: tuple[Tool, ...]) -> Sample:
    tool, text, arguments, result = request
    called: Message = {"type": "function", "function": _call(tool, arguments)}
    turns = (*ask(text), {"role": "assistant", "content": "", "tool_calls": [called]},
             {"role": "tool", "content": result if isinstance(result, str) else json.dumps(result)})  # fmt: skip
    problem = json.dumps([_call(tool, arguments), result])
    return Sample("after", problem, turns, spoken(result), "The tool has answered.", tools)


def _refused(request: Request, tools: tuple[Tool, ...]) -> Sample:
    tool, text, arguments, _ = request
    return Sample("refuse", f"no {json.dumps(_call(tool, arguments))}", ask(text), REFUSAL, "No tool fits.", tools)


def call(rng: random.Random, held_out: bool) -> Sample:
    """A request that one of the offered tools fits."""

    def make() -> Sample:
        request = _request(rng)
        return _called(request, _offer(rng, [request[0]], _others(rng)))

    return draw(make, held_out)


def after(rng: random.Random, held_out: bool) -> Sample:
    """The turn after a tool's result."""

    def make() -> Sample:
        request = _request(rng)
        return _answered(request, _offer(rng, [request[0]], _others(rng)))

    return draw(make, held_out)


def refuse(rng: random.Random, held_out: bool) -> Sample:
    """A request for an action that none of the offered tools does."""

    def make() -> Sample:
        request = _generic(rng)
        tools = _offer(rng, [request[0]], 1 + _others(rng))
        return _refused(request, tuple(tool for tool in tools if tool is not request[0])[:3])

    return draw(make, held_out)


def unneeded(sample: Sample, tools: tuple[Tool, ...]) -> Sample:
    """A sample of another skill with tools that do not matter to it."""
    return replace(sample, skill="no tool", tools=tools)


def offered(rng: random.Random) -> tuple[Tool, ...]:
    """Tools that fit no question of the other skills."""
    return _offer(rng, [_generic(rng)[0]], _others(rng) // 2)


def scene(rng: random.Random, other: Sample) -> tuple[Sample, ...]:
    """Training samples that share their tools: a call of each tool, and one more.

    The last is an answer to a result, a refusal or the `other` skill's sample.
    """
    requests = [_request(rng)]
    for _ in range(_others(rng)):
        request = _request(rng)
        if not any(_alike(request[0], one[0]) for one in requests):
            requests.append(request)
    tools = tuple(request[0] for request in requests)
    samples = [_called(request, tools) for request in requests]
    stranger, kind = _generic(rng), rng.random()
    if kind < 0.35:
        samples.append(_answered(rng.choice(requests), tools))
    elif kind < 0.6 and not any(_alike(stranger[0], tool) for tool in tools):
        samples.append(_refused(stranger, tools))
    elif kind < 0.85:
        samples.append(unneeded(other, tools))
    return tuple(sample for sample in samples if not is_held_out(sample.problem))
