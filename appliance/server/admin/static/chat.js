// The playground: a conversation, its knobs, and the same request as a command.

import { key, Refused, ROUTES, stream, transcribe } from "./api.js";
import { attachments, contentOf, preview, setAttachments, setModalities, start as startAttachments } from "./attachments.js";
import { $, copyButton, el } from "./dom.js";
import { markdown } from "./markdown.js";
import { count, seconds } from "./numbers.js";
import { messageOf, newReply, pretty, take } from "./reply.js";
import { bodyOf, curlOf, EXAMPLE_SCHEMA, EXAMPLE_TOOLS, Mistake } from "./request.js";
import { showWhy } from "./timeline.js";

const EXAMPLES = ["What is 17 + 25?", "Reverse the list: red, green, blue", "What is the weather in Oslo?"];

const messages = [];
let model = "";
let transcribes = false; // a speech model, which only transcribes audio
let running = null;

export function setModel(name, modalities) {
  model = name;
  transcribes = modalities.length > 0 && !modalities.includes("text");
  setModalities(modalities);
  showCurl();
}

const settings = () => Object.fromEntries(new FormData($("settings")));

function showCurl() {
  const form = settings();
  $("schema-field").hidden = form.format !== "json_schema";
  $("regex-field").hidden = form.format !== "regex";
  const draft = $("prompt").value.trim();
  const items = attachments();
  const content = contentOf(draft || (items.length ? "" : "Hello"), items);
  const told = draft || items.length || !messages.length ? [...messages, { role: "user", content }] : messages;
  try {
    $("curl").textContent = curlOf(bodyOf(form, told, model), new URL(ROUTES.chat, document.baseURI).href, Boolean(key()));
    mark(null);
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    $("curl").textContent = error.message;
    mark(error);
  }
}

function mark(mistake) {
  for (const field of $("settings").elements) {
    if (!field.name) continue;
    const wrong = mistake?.field === field.name;
    field.toggleAttribute("aria-invalid", wrong);
    if (wrong) field.setAttribute("aria-invalid", "true");
  }
}

// Messages on the screen

function add(node) {
  $("empty").hidden = true;
  $("log").append(node);
  scroll(true);
  return node;
}

// Follows the text as long as the reader is at its end.
function scroll(always = false) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

// Removes a turn and all that follow it, from the screen and from the conversation.
function rewind(turn) {
  while (turn.node.nextSibling) turn.node.nextSibling.remove();
  turn.node.remove();
  messages.length = Math.min(turn.index, messages.length);
  $("empty").hidden = $("log").children.length > 1;
  showCurl();
}

function bubble(role, ...content) {
  const names = { user: "You", assistant: "Model", tool: "Tool result" };
  return el("article", { class: `turn ${role}` }, el("h2", { class: "who" }, names[role]), ...content.filter(Boolean));
}

// The parts of a reply that grow; each is made once, so that what the reader opened stays open.
function view() {
  const thought = el("div", { class: "thought" });
  const thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Thinking"), thought);
  const content = el("div", { class: "content" });
  const calls = el("div", { class: "calls" });
  const foot = el("footer", { class: "facts" });
  const node = bubble("assistant", thinking, content, calls, foot);
  node.classList.add("live");
  node.setAttribute("aria-busy", "true");
  return { node, thinking, thought, content, calls, foot };
}

function paint(seen, reply) {
  seen.thinking.hidden = !reply.reasoning.trim();
  seen.thought.textContent = reply.reasoning.trim();
  seen.content.replaceChildren(...markdown(reply.content));
  seen.calls.replaceChildren(...reply.calls.map((call) =>
    el("section", { class: "call", "aria-label": `Call of ${call.name}` },
      el("h3", {}, el("span", { class: "tag" }, "call"), el("code", {}, call.name)),
      el("pre", { class: "code" }, pretty(call.arguments)))));
  scroll();
}

function facts(seen, reply, times) {
  const told = [];
  if (times.first) told.push(`first token ${seconds((times.first - times.start) / 1000)}`);
  if (reply.usage) {
    const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = reply.usage;
    const accepted = reply.usage.completion_tokens_details?.accepted_prediction_tokens;
    const drafted = accepted ? ` (${count(accepted)} accepted drafts)` : "";
    const cached = details?.cached_tokens ? ` (${count(details.cached_tokens)} cached)` : "";
    told.push(`${count(prompt)} prompt tokens${cached}`, `${count(tokens)} tokens${drafted}`);
    const span = (times.end - times.first) / 1000;
    if (tokens > 1 && span > 0) told.push(`${count((tokens - 1) / span)} tokens/s`);
  }
  if (reply.finish && reply.finish !== "stop") told.push(`finish reason: ${reply.finish.replace("_", " ")}`);
  seen.foot.replaceChildren(...told.map((each) => el("span", {}, each)));
  if (reply.id) seen.foot.append(el("button", { type: "button", class: "link", onclick: () => showWhy(reply.id) }, "timeline"));
  if (reply.content) seen.foot.append(copyButton(() => reply.content, "Copy reply"));
  seen.foot.append(el("button", { type: "button", class: "link retry", onclick: () => retry(seen) }, "retry"));
}

// Requests

function retry(turn) {
  if (running) return;
  rewind(turn);
  ask();
}

function edit(turn) {
  if (running) return;
  rewind(turn);
  $("prompt").value = turn.text;
  setAttachments(turn.items);
  grow();
  $("prompt").focus();
}

async function ask() {
  let body;
  try {
    body = bodyOf(settings(), messages, model);
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    mark(error);
    $("knobs").open = true;
    return ended(error, newReply());
  }
  const seen = { ...view(), index: messages.length }, reply = newReply(), times = { start: performance.now(), first: 0, end: 0 };
  add(seen.node);
  running = new AbortController();
  busy(true);
  let due = 0;
  try {
    await stream(body, running.signal, (record) => {
      take(reply, record);
      if (!times.first && (reply.content || reply.reasoning || reply.calls.length)) times.first = performance.now();
      if (record.choices.length) times.end = performance.now();
      due ||= requestAnimationFrame(() => { due = 0; paint(seen, reply); });
    });
    messages.push(messageOf(reply));
  } catch (error) {
    ended(error, reply);
  } finally {
    cancelAnimationFrame(due);
    paint(seen, reply);
    facts(seen, reply, times);
    seen.node.classList.remove("live");
    seen.node.removeAttribute("aria-busy");
    if (!reply.content && !reply.reasoning && !reply.calls.length && !reply.finish) seen.node.remove();
    running = null;
    busy(false);
  }
  $("announce").textContent = reply.content;
  if (reply.finish && reply.calls.length) results(reply.calls);
  showCurl();
}

// What there is of a reply that was stopped or failed stays part of the conversation; of nothing nothing stays.
function ended(error, reply) {
  if (reply.content || reply.reasoning) messages.push({ role: "assistant", content: reply.content });
  else if (messages[messages.length - 1]?.role === "user") $("prompt").value ||= textOf(messages.pop().content);
  grow();
  if (error.name === "AbortError") reply.finish ||= "stopped";
  else failed(error);
}

function failed(error) {
  const id = error instanceof Refused && error.requestId ? ` Request ${error.requestId}.` : "";
  add(el("div", { class: "fault", role: "alert" }, el("strong", {}, "The request failed. "), error.message, id));
  if (error.status === 401) document.dispatchEvent(new Event("wants-key"));
}

// Fields for what the called functions give back.
function results(calls) {
  const fields = calls.map((call) => el("label", {}, `Result of ${call.name}`,
    el("textarea", { rows: 2, class: "code", spellcheck: "false", placeholder: "return value of the function" },
      call.name === EXAMPLE_TOOLS[0].function.name ? '{"temperature": 7, "sky": "rain"}' : "")));
  const form = el("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    const given = fields.map((label) => label.querySelector("textarea"));
    calls.forEach((call, at) => {
      const content = given[at].value.trim();
      messages.push({ role: "tool", tool_call_id: call.id, content });
      add(bubble("tool", el("pre", { class: "code" }, content)));
    });
    form.remove();
    ask();
  } }, ...fields, el("button", { class: "main small", type: "submit" }, calls.length > 1 ? "Send results" : "Send result"));
  add(form);
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

const textOf = (content) => (Array.isArray(content) ? content.find((part) => part.type === "text")?.text || "" : content);

// A speech model has no conversation: each recording becomes a text.
async function write(items) {
  running = new AbortController();
  busy(true);
  for (const item of items) {
    add(bubble("user", el("div", { class: "sent" }, preview(item))));
    try {
      const { text } = await transcribe(item.file, model, running.signal);
      add(bubble("assistant", el("div", { class: "content" }, text)));
      $("announce").textContent = text;
    } catch (error) {
      if (error.name !== "AbortError") failed(error);
    }
  }
  running = null;
  busy(false);
}

function say(text) {
  const items = attachments();
  if (running || (!text.trim() && !items.length)) return;
  setAttachments([]);
  if (transcribes) return void write(items);
  document.querySelector("form.results")?.remove();
  dropUnanswered();
  const turn = { text, items, index: messages.push({ role: "user", content: contentOf(text, items) }) - 1 };
  const tools = el("footer", { class: "facts" }, el("button", { type: "button", class: "link edit", onclick: () => edit(turn) }, "edit"));
  turn.node = add(bubble("user", items.length && el("div", { class: "sent" }, ...items.map(preview)), el("p", { class: "prose" }, text), tools));
  $("prompt").value = "";
  grow();
  ask();
}

// A call whose result nobody gave cannot stand before a new question.
function dropUnanswered() {
  const last = messages[messages.length - 1];
  if (last?.tool_calls) {
    delete last.tool_calls;
    if (!last.content) messages.pop();
  }
}

function clear() {
  running?.abort();
  messages.length = 0;
  $("log").replaceChildren($("empty"));
  $("empty").hidden = false;
  showCurl();
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 200)}px`;
}

export function start() {
  $("settings").elements.schema.value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
  if (matchMedia("(max-width: 860px)").matches) $("knobs").open = false;
  $("examples").append(...EXAMPLES.map((text) => el("button", { type: "button", class: "example", onclick: () => {
    if (text.includes("weather") && !$("settings").elements.tools.value.trim()) insertTools();
    say(text);
  } }, text)));
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); say($("prompt").value); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); say($("prompt").value); }
  });
  $("prompt").addEventListener("input", () => { grow(); showCurl(); });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", clear);
  $("settings").addEventListener("input", showCurl);
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("tools-example").addEventListener("click", insertTools);
  $("curl-box").append(copyButton(() => $("curl").textContent, "Copy the command"));
  startAttachments(showCurl);
  showCurl();
}

function insertTools() {
  $("settings").elements.tools.value = JSON.stringify(EXAMPLE_TOOLS, null, 1);
  showCurl();
}
