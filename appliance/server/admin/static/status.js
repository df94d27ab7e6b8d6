// Status view: polls metrics while it is visible.

import { json, ROUTES, text, told } from "./api.js";
import { $, el, sparkline } from "./dom.js";
import { between, buckets, by, count, percent, quantileText, rate, read, seconds, sum } from "./numbers.js";
import { showWhy } from "./timeline.js";

const PAUSE_MS = 2000;
const KEPT = 90; // samples, three minutes
const LATENCIES = [
  ["Time to first token", "slipway_time_to_first_token_seconds"],
  ["Inter-token latency", "slipway_inter_token_latency_seconds"],
  ["Time in the queue", "slipway_request_queue_time_seconds"],
  ["Request duration", "slipway_request_duration_seconds"],
];
const SHARES = [0.5, 0.9, 0.99];
const STATES = {
  media: "loading media",
  gateway: "arrived", held: "queued in the gateway", queued: "queued", blocked: "first in the queue", preempted: "preempted",
  prefill: "prefill", decode: "decode", over: "finished",
};

const samples = []; // {at, metrics, tokens, prompt, running, waiting, kv}; metrics are null in those before the page was opened
let timer = 0;

export function watch(is, onFault) {
  clearTimeout(timer);
  if (!is) return;
  const again = async () => {
    try {
      await poll();
      onFault(null);
    } catch (error) {
      onFault(error);
    }
    timer = setTimeout(again, PAUSE_MS);
  };
  again();
}

// Convert the load history of the gateway to samples.
function before(history, now) {
  const { interval_s: interval, generated_tokens: tokens, prompt_tokens: prompt } = history;
  return tokens.map((_, at) => ({
    at: now - (tokens.length - at) * interval, metrics: null, tokens: tokens[at], prompt: prompt[at], open: history.open_requests[at],
    speed: at ? rate(tokens[at - 1], tokens[at], interval) : 0,
    reading: at ? rate(prompt[at - 1], prompt[at], interval) : 0,
    running: history.running[at], waiting: history.waiting[at], kv: history.kv_cache_usage[at],
  }));
}

async function poll() {
  if (!samples.length) samples.push(...before(await json(ROUTES.history), performance.now() / 1000));
  const [ready, exposition, load] = await Promise.all([told(ROUTES.ready), text(ROUTES.metrics), json(ROUTES.load)]);
  const metrics = read(exposition), last = samples[samples.length - 1];
  const at = performance.now() / 1000;
  const tokens = sum(metrics, "slipway_generation_tokens_total"), prompt = sum(metrics, "slipway_prompt_tokens_total");
  const kv = metrics.get("slipway_kv_cache_usage_ratio") || [];
  samples.push({
    at, metrics, tokens, prompt, open: load.server_load,
    speed: last ? rate(last.tokens, tokens, at - last.at) : 0,
    reading: last ? rate(last.prompt, prompt, at - last.at) : 0,
    running: sum(metrics, "slipway_requests_running"),
    waiting: sum(metrics, "slipway_requests_waiting") + sum(metrics, "slipway_requests_held"),
    kv: kv.length ? kv.reduce((total, sample) => total + sample.value, 0) / kv.length : 0,
  });
  if (samples.length > KEPT) samples.shift();
  paintEngines(ready);
  paintTiles();
  paintLatency();
  paintEnds(metrics);
  paintRecent((await json(ROUTES.recent)).data);
}

function paintEngines({ phase, engines, reason }) {
  const cards = engines.map((engine) => {
    const bytes = (engine.memory || []).flatMap((rank) => Object.values(rank.parts)).reduce((total, part) => total + (part.real ?? part.planned ?? 0), 0);
    const facts = [engine.detail, bytes ? `${(bytes / 2 ** 20).toFixed(0)} MiB used` : null].filter(Boolean);
    return el("section", { class: "engine" },
      el("span", { class: `dot ${engine.phase === "ready" ? "good" : "busy"}`, "aria-hidden": "true" }),
      el("strong", {}, engine.name), el("span", {}, engine.phase), facts.map((fact) => el("span", { class: "hint" }, fact)),
      engine.progress < 1 ? el("progress", { value: engine.progress, max: 1, "aria-label": `progress of ${engine.name}` }) : null);
  });
  const why = reason ? [el("p", { class: "fault" }, Object.values(reason).join(" "))] : [];
  $("engines").replaceChildren(...why, ...cards);
  $("engines").dataset.phase = phase;
}

function paintTiles() {
  const last = samples[samples.length - 1];
  const line = (name) => samples.map((each) => each[name]);
  const asked = sum(last.metrics, "slipway_prefix_cache_query_tokens_total");
  const hits = sum(last.metrics, "slipway_prefix_cache_hit_tokens_total");
  $("tiles").replaceChildren(
    tile("Tokens/s", count(last.speed), "generated", sparkline(line("speed"))),
    tile("Prompt tokens/s", count(last.reading), "prefilled", sparkline(line("reading"))),
    tile("Running", count(last.running), `${count(last.open)} open connections`, sparkline(line("running"), 1)),
    tile("Waiting", count(last.waiting), last.waiting ? waitsFor(last.metrics) : "none", sparkline(line("waiting"), 1)),
    tile("KV cache", percent(last.kv), "used", sparkline(line("kv"), 1)),
    tile("Prefix cache", asked ? percent(hits / asked) : "–", `of ${count(asked)} prompt tokens`, null),
  );
}

function waitsFor(metrics) {
  const reasons = Object.entries(by(metrics, "slipway_requests_waiting_by_reason", "reason")).filter(([, value]) => value);
  return reasons.map(([reason]) => `for ${reason}`).join(", ") || "for an engine";
}

function tile(name, value, under, line) {
  return el("section", { class: "tile" }, el("h2", {}, name), el("p", { class: "value" }, value), el("p", { class: "hint" }, under), line);
}

function paintLatency() {
  const first = samples.find((each) => each.metrics), last = samples[samples.length - 1];
  const rows = LATENCIES.map(([name, metric]) => {
    const all = buckets(last.metrics, metric), lately = between(buckets(first.metrics, metric), all);
    const some = lately.length && lately[lately.length - 1][1] > 0;
    return { name, some, of: some ? lately : all };
  });
  const lately = rows.some((row) => row.some);
  $("latency-span").textContent = lately ? `in the last ${seconds(last.at - first.at)}` : "since the start";
  $("latency").replaceChildren(table(["", "p50", "p90", "p99"],
    rows.map(({ name, of }) => [el("th", { scope: "row" }, name), ...SHARES.map((share) => el("td", { class: "number" }, quantileText(of, share)))])));
}

function paintEnds(metrics) {
  const ends = { ...by(metrics, "slipway_requests_total", "finished_reason") };
  const refused = sum(metrics, "slipway_admission_rejections_total");
  const rows = [...Object.entries(ends), ["rejected", refused],
    ["engine restarts", sum(metrics, "slipway_engine_restarts_total")], ["preemptions", sum(metrics, "slipway_preemptions_total")],
    ...draftRows(metrics)];
  $("ends").replaceChildren(el("dl", { class: "ends" }, rows.map(([name, value]) =>
    el("div", { class: value ? "" : "none" }, el("dt", {}, name), el("dd", {}, count(value))))));
}

function draftRows(metrics) {
  const drafts = sum(metrics, "slipway_drafts_total"), accepted = sum(metrics, "slipway_draft_accepted_tokens_total");
  if (!drafts) return [];
  const length = Math.round(100 * (1 + accepted / drafts)) / 100;
  return [["draft tokens", sum(metrics, "slipway_draft_tokens_total")], ["accepted draft tokens", accepted], ["acceptance length", length]];
}

function paintRecent(list) {
  if (!list.length) return $("recent").replaceChildren(el("p", { class: "hint" }, "None yet."));
  const focused = document.activeElement?.dataset?.id;
  $("recent").replaceChildren(table(["request", "state", "prompt", "tokens", "first token", "time", ""], list.map((one) => [
    el("th", { scope: "row" }, el("code", { title: one.id }, short(one.id))),
    el("td", {}, el("span", { class: `badge ${badge(one)}` }, one.finish || STATES[one.state] || one.state)),
    el("td", { class: "number" }, one.prompt_tokens ?? "–"),
    el("td", { class: "number" }, one.tokens ?? "…"),
    el("td", { class: "number" }, one.ttft_ms === null ? "–" : seconds(one.ttft_ms / 1000)),
    el("td", { class: "number" }, seconds((one.duration_ms ?? one.age_ms) / 1000)),
    el("td", {}, el("button", { type: "button", class: "link", "data-id": one.id, "aria-label": `timeline of ${one.id}`, onclick: () => showWhy(one.id) }, "timeline")),
  ])));
  if (focused) [...$("recent").querySelectorAll("button")].find((each) => each.dataset.id === focused)?.focus();
}

const short = (id) => (id.length > 18 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id);

function badge({ state, finish }) {
  if (finish) return ["stop", "length"].includes(finish) ? "done" : finish === "abort" ? "left" : "bad";
  return ["decode", "prefill"].includes(state) ? "now" : "wait";
}

function table(heads, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells)))));
}
