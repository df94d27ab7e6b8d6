// Why a request took as long as it did, in a panel at the side.

import { json, ROUTES } from "./api.js";
import { $, el } from "./dom.js";
import { seconds } from "./numbers.js";

const STATES = {
  gateway: "in the gateway", held: "held without an engine", queued: "queued", blocked: "first to wait",
  preempted: "preempted", prefill: "computing the prompt", decode: "giving tokens",
};

export async function showWhy(id) {
  $("why-title").textContent = "Why";
  $("why-body").replaceChildren(el("p", { class: "hint" }, "Asking…"));
  if (!$("why").open) $("why").showModal();
  try {
    const { choices } = await json(ROUTES.why(id));
    $("why-body").replaceChildren(...choices.map(choice));
  } catch (error) {
    $("why-body").replaceChildren(el("p", { class: "fault" }, error.message));
  }
}

function choice({ id, spent_ms: spent, events }) {
  const total = Object.values(spent).reduce((one, two) => one + two, 0);
  const shares = Object.entries(spent).filter(([, value]) => value > 0);
  const bar = el("div", { class: "bar", "aria-hidden": "true" }, shares.map(([state, value]) => {
    const part = el("span", { class: `state-${state}` });
    part.style.flexGrow = value / total;
    return part;
  }));
  return el("article", { class: "story" },
    el("h3", {}, el("code", {}, id), el("span", {}, seconds(total / 1000))),
    bar,
    el("ul", { class: "legend" }, shares.map(([state, value]) =>
      el("li", {}, el("i", { class: `state-${state}` }), STATES[state] || state, el("b", {}, seconds(value / 1000))))),
    el("ol", { class: "events" }, events.map((event) =>
      el("li", {}, el("time", {}, `${event.at_ms.toFixed(1)} ms`), el("span", {}, event.text)))),
  );
}
