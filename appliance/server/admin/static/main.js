// Puts the page together: views, the key, and whether the service is ready.

import { json, key, ROUTES, setKey, told } from "./api.js";
import { setModel, start } from "./chat.js";
import { $ } from "./dom.js";
import { watch } from "./status.js";

const VIEWS = ["playground", "status"];
const PHASES = { ready: "good", failed: "bad", draining: "busy" };

function show() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : "playground";
  for (const name of VIEWS) {
    $(name).hidden = name !== view;
    if (name === view) $(`tab-${name}`).setAttribute("aria-current", "page");
    else $(`tab-${name}`).removeAttribute("aria-current");
  }
  watch(view === "status" && !document.hidden, notice);
}

function notice(error) {
  $("notice").hidden = error === null;
  $("notice").textContent = error === null ? "" : error.message;
  if (error?.status === 401) askKey();
}

let refused = false; // who said no to the question for a key is not asked again by itself

function askKey() {
  if (refused || $("key-dialog").open) return;
  $("key").value = key();
  $("key-dialog").showModal();
}

async function phase() {
  try {
    const ready = await told(ROUTES.ready);
    const share = ready.progress < 1 && ready.phase !== "ready" ? ` ${Math.round(100 * ready.progress)} %` : "";
    $("phase").textContent = ready.phase + share;
    $("phase").className = `pill ${PHASES[ready.phase] || "busy"}`;
    if (ready.phase === "ready" && !$("model").textContent) await findModel();
  } catch {
    $("phase").textContent = "unreachable";
    $("phase").className = "pill bad";
  }
}

async function findModel() {
  try {
    const { data } = await json(ROUTES.models);
    $("model").textContent = data[0].id;
    $("model").title = `context length: ${data[0].max_model_len} tokens`;
    document.title = `${data[0].id} – Slipway`;
    setModel(data[0].id, data[0].input_modalities || []);
    notice(null);
  } catch (error) {
    notice(error);
  }
}

$("key-open").addEventListener("click", () => { refused = false; askKey(); });
$("key-cancel").addEventListener("click", () => $("key-dialog").close(""));
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue === "keep") {
    setKey($("key").value.trim());
    findModel().then(show);
  } else {
    refused = true;
  }
  $("key").value = "";
  $("key-dialog").returnValue = "";
});
$("why-close").addEventListener("click", () => $("why").close());
$("why").addEventListener("click", (event) => { if (event.target === $("why")) $("why").close(); });
document.addEventListener("wants-key", () => { refused = false; askKey(); });
document.addEventListener("visibilitychange", show);
addEventListener("hashchange", show);

start();
show();
phase();
setInterval(() => { if (!document.hidden) phase(); }, 3000);
