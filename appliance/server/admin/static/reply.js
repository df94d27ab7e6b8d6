// Records of a chat stream put together. No DOM here.

export const newReply = () => ({ id: "", content: "", reasoning: "", calls: [], finish: null, stop: null, usage: null });

export function take(reply, record) {
  reply.id = record.id || reply.id;
  if (record.usage) reply.usage = record.usage;
  for (const choice of record.choices) {
    const { delta } = choice;
    reply.content += delta.content || "";
    reply.reasoning += delta.reasoning || "";
    for (const call of delta.tool_calls || []) {
      const known = (reply.calls[call.index] ||= { id: call.id, name: call.function.name, arguments: "" });
      known.arguments += call.function.arguments || "";
    }
    if (choice.finish_reason) {
      reply.finish = choice.finish_reason;
      reply.stop = choice.stop_reason ?? null;
    }
  }
  return reply;
}

// The reply as a message of the conversation that goes on.
export function messageOf(reply) {
  const message = { role: "assistant", content: reply.content };
  if (reply.reasoning) message.reasoning = reply.reasoning;
  if (reply.calls.length) {
    message.tool_calls = reply.calls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

// Arguments as people read them; what is cut or no JSON stays as it came.
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
