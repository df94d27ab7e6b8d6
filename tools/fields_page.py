"""Writes docs/request-fields.md from the tables in appliance/server/schema/fields."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from appliance.server.schema.chat import ChatRequest  # noqa: E402
from appliance.server.schema.completions import CompletionRequest  # noqa: E402
from appliance.server.schema.fields import shared  # noqa: E402
from appliance.server.schema.fields.field import ANY, Field  # noqa: E402
from appliance.server.schema.fields.tables import TABLES  # noqa: E402
from appliance.server.schema.messages import MessagesRequest  # noqa: E402
from appliance.server.schema.pooling import EmbeddingRequest  # noqa: E402
from appliance.server.schema.responses import ResponsesRequest  # noqa: E402
from tools.pages import write_pages  # noqa: E402

PAGE = ROOT / "docs" / "request-fields.md"
HEAD = """# Request fields of other servers

<!-- made by tools/fields_page.py from appliance/server/schema/fields; a test keeps it so -->

Fields outside the schema of a route (`GET /openapi.json`) that clients of other servers send. Null is always accepted.

- *Read as*: the field has the same meaning as another one. Both at once are 400.
- *Accepted*: any value, as the field has no influence on the output; or only these values, as they ask for nothing.
- *Otherwise*: any other value is 400 with this reason, as ignoring it would change the output.

`endpoints.unknown_fields` says what becomes of fields that are neither here nor in the schema: `refuse` (400), `warn`
(accepted, and the gateway's log names each such field once) or `ignore`. Fields inside of messages, tools and other
objects are not checked.
"""
COLUMNS = "| field | read as | accepted | otherwise |\n|---|---|---|---|\n"
CONVERTED = {
    shared.reasoning_options: "`reasoning_effort`, `include_reasoning`, `thinking_token_budget`",
    shared.thinking_switch: "`chat_template_kwargs.enable_thinking` and `.thinking`",
    shared.verbosity: "`chat_template_kwargs.verbosity`",
}
GENERATE = {
    "POST /v1/chat/completions": TABLES[ChatRequest],
    "POST /v1/completions": TABLES[CompletionRequest],
    "POST /v1/responses": TABLES[ResponsesRequest],
    "POST /v1/messages": TABLES[MessagesRequest],
}


def _sections() -> Iterator[tuple[str, Mapping[str, Field]]]:
    """What all routes that generate have in common comes first."""
    first, *others = GENERATE.values()
    common = {name: field for name, field in first.items() if all(each.get(name) == field for each in others)}
    yield "All routes that generate", common
    for title, table in GENERATE.items():
        yield title, {name: field for name, field in table.items() if name not in common}
    yield "Routes that pool", TABLES[EmbeddingRequest]


def _row(name: str, field: Field) -> str:
    target = CONVERTED[field.convert] if field.convert is not None else f"`{field.alias}`" if field.alias else ""
    values = () if field.neutral is ANY else [f"`{json.dumps(each)}`" for each in field.neutral if each is not None]
    accepted = "any value" if field.neutral is ANY else ", ".join(dict.fromkeys(values))
    if field.same_as:
        accepted += f", the value of `{field.same_as}`"
    return f"| `{name}` | {target} | {accepted} | {field.reason} |\n"


def fields_page() -> str:
    """The page as text."""
    parts = [HEAD]
    for title, table in _sections():
        rows = "".join(_row(name, field) for name, field in sorted(table.items()))
        parts.append(f"\n## {title}\n\n{COLUMNS}{rows}")
    return "".join(parts)


if __name__ == "__main__":
    write_pages(__doc__, {"request-fields.md": fields_page})
