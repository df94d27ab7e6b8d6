// The service's API. Paths are relative, so that the page works below any prefix; the key is a header, never in a URL.

export const ROUTES = {
  chat: "v1/chat/completions",
  models: "v1/models",
  transcribe: "v1/audio/transcriptions",
  ready: "ready",
  metrics: "metrics",
  load: "load",
  history: "load/history?limit=90",
  recent: "v1/requests",
  why: (id) => `v1/requests/${encodeURIComponent(id)}/why`,
};

const KEY = "slipway.key";

export const key = () => sessionStorage.getItem(KEY) || "";
export const setKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

export class Refused extends Error {
  constructor(status, fault) {
    super(fault?.message || `The service answered ${status}.`);
    this.status = status;
    this.param = fault?.param || null;
    this.requestId = fault?.request_id || null;
  }
}

async function send(path, options = {}) {
  const headers = { ...(key() ? { authorization: `Bearer ${key()}` } : {}), ...options.headers };
  const reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  if (reply.ok || options.any) return reply;
  let fault = null;
  try { fault = (await reply.json()).error; } catch { /* no error object: the status says it */ }
  throw new Refused(reply.status, fault);
}

export const json = async (path) => (await send(path)).json();
export const text = async (path) => (await send(path)).text();
// What it says whatever the status is: /ready is 503 with a body while the service loads.
export const told = async (path) => (await send(path, { any: true })).json();

// The records that are whole in `buffer`, and the rest of it. A record is JSON, or null for the terminator.
export function cut(buffer) {
  const parts = buffer.split("\n\n");
  const rest = parts.pop();
  const records = [];
  for (const part of parts) {
    const line = part.split("\n").find((each) => each.startsWith("data: "));
    if (line) records.push(line === "data: [DONE]" ? null : JSON.parse(line.slice(6)));
  }
  return { records, rest };
}

// The text of a recording.
export async function transcribe(file, model, signal) {
  const body = new FormData();
  body.append("file", file, file.name);
  body.append("model", model);
  return (await send(ROUTES.transcribe, { method: "POST", body, signal })).json();
}

// Streams a chat; `take` gets each record. Raises Refused, also for an error inside the stream.
export async function stream(body, signal, take) {
  const headers = { "content-type": "application/json" };
  const reply = await send(ROUTES.chat, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(reply.status, { message: "The connection closed before the reply was complete." });
    const { records, rest } = cut(buffer + value);
    buffer = rest;
    for (const record of records) {
      if (record === null) return;
      if (record.error) throw new Refused(record.error.code, record.error);
      take(record);
    }
  }
}
