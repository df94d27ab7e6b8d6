// What the knobs ask for, as the body of a chat request and as a curl command. No DOM here.

export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

export class Mistake extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function parsed(field, text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Mistake(field, `${what} is not valid JSON: ${error.message}`);
  }
}

const NUMBERS = { temperature: Number, top_p: Number, top_k: Number, max_tokens: Number, seed: Number };

// `settings` are texts as the form has them; an empty one leaves its field out. Raises Mistake.
export function bodyOf(settings, messages, model) {
  const body = { model, messages: settings.system.trim() ? [{ role: "system", content: settings.system }, ...messages] : messages };
  for (const [name, read] of Object.entries(NUMBERS)) {
    if (settings[name].trim() === "") continue;
    const value = read(settings[name]);
    if (!Number.isFinite(value)) throw new Mistake(name, `${name} is not a number.`);
    body[name] = value;
  }
  if (settings.thinking !== "auto") body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = parsed("schema", settings.schema, "The schema");
    body.response_format = { type: "json_schema", json_schema: { name: "reply", schema } };
  }
  if (settings.format === "regex") {
    if (!settings.regex) throw new Mistake("regex", "The expression is empty.");
    body.structured_outputs = { regex: settings.regex };
  }
  if (settings.tools.trim()) {
    body.tools = parsed("tools", settings.tools, "The list of tools");
    if (!Array.isArray(body.tools)) throw new Mistake("tools", "Tools must be a list.");
    body.tool_choice = settings.choice;
  }
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

// The key itself is never shown: the command reads it from a variable. Data URLs are cut.
export function curlOf(body, url, hasKey) {
  const short = (name, value) => (typeof value === "string" ? value.replace(/^(data:[^,]{0,80},[^]{24})[^]+$/, "$1…") : value);
  const quoted = JSON.stringify(body, short, 1).replaceAll("'", "'\\''");
  const guard = hasKey ? ' \\\n  -H "authorization: Bearer $SLIPWAY_KEY"' : "";
  return `curl -N ${url} \\\n  -H 'content-type: application/json'${guard} \\\n  -d '${quoted}'`;
}
