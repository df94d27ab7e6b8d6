// Side panel with the timeline of a request.

import { json, ROUTES } from "./api.js";
import { $, el } from "./dom.js";
import { seconds } from "./numbers.js";

const STATES = {
  media: "loading media", gateway: "in the gateway", held: "waiting for an engine", queued: "queued", blocked: "first in the queue",
  preempted: "preempted", prefill: "prefill", decode: "decode",
};

export async function showWhy(id) {
    $("why-body").replaceChildren(el("p", { class: "hint" }, "Loading…"));
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
  return el("article", { class: "timeline" },
    el("h3", {}, el("code", {}, id), el("span", {}, seconds(total / 1000))),
    bar,
    el("ul", { class: "legend" }, shares.map(([state, value]) =>
      el("li", {}, el("i", { class: `state-${state}` }), STATES[state] || state, el("b", {}, seconds(value / 1000))))),
    el("ol", { class: "events" }, events.map((event) =>
      el("li", {}, el("time", {}, `${event.at_ms.toFixed(1)} ms`), el("span", {}, event.text)))),
  );
}
