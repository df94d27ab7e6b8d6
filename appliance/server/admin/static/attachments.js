// Pictures, videos and sound that go with the next message: chosen, dropped, pasted or recorded.

import { $, el } from "./dom.js";

const PARTS = { image: "image_url", video: "video_url", audio: "audio_url" };

let accepted = [];
let readsText = true;
let attached = [];
let changed = () => {};
let recorder = null;

export const kindOf = (type) => Object.keys(PARTS).find((kind) => type.startsWith(`${kind}/`));

// What the model reads.
export function setModalities(kinds) {
  accepted = Object.keys(PARTS).filter((kind) => kinds.includes(kind));
  readsText = kinds.includes("text");
  $("attach").hidden = !accepted.length;
  $("record").hidden = !accepted.includes("audio") || !navigator.mediaDevices || !globalThis.MediaRecorder;
  $("file").accept = accepted.map((kind) => `${kind}/*`).join(",");
}

const reads = () => [...(readsText ? ["text"] : []), ...accepted].join(", ");

export const attachments = () => attached;

export function setAttachments(items) {
  attached = [...items];
  note("");
  paint();
}

// The content of a message: its text, or its parts.
export function contentOf(text, items) {
  if (!items.length) return text;
  const parts = items.map(({ kind, url }) => ({ type: PARTS[kind], [PARTS[kind]]: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

export function preview({ kind, url, name }) {
  if (kind === "image") return el("img", { src: url, alt: name });
  if (kind === "audio") return el("audio", { src: url, controls: true, "aria-label": name });
  return el("video", { src: url, controls: true, "aria-label": name });
}

// Shows why something was not attached, until the next change.
function note(text) {
  $("attach-note").textContent = text;
  $("attach-note").hidden = !text;
}

function paint() {
  $("tray").replaceChildren(...attached.map((item) => el("figure", { class: "thumb" }, preview(item),
    el("button", { type: "button", class: "link", "aria-label": `Remove ${item.name}`, onclick: () => setAttachments(attached.filter((each) => each !== item)) }, "remove"))));
  $("tray").hidden = !attached.length;
  changed();
}

const asUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

async function take(files) {
  note("");
  for (const file of files) {
    const kind = kindOf(file.type);
    if (!accepted.includes(kind)) {
      note(`${file.name} is not added: the model reads ${reads()}.`);
      continue;
    }
    try {
      // A parameter of the type, such as a codec, is not part of a data URL that the API reads.
      const url = (await asUrl(file)).replace(/^data:([^;,]+)[^,]*,/, "data:$1;base64,");
      attached.push({ kind, url, name: file.name, file });
    } catch (error) {
      note(`${file.name} is not added: ${error.message}`);
    }
  }
  paint();
}

async function record() {
  if (recorder) return recorder.stop();
  let sound;
  note("");
  $("record").disabled = true; // until the browser has asked for permission
  try {
    sound = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch {
    note("The browser does not allow the microphone.");
    return;
  } finally {
    $("record").disabled = false;
  }
  const pieces = [];
  recorder = new MediaRecorder(sound);
  recorder.addEventListener("dataavailable", (event) => pieces.push(event.data));
  recorder.addEventListener("stop", () => {
    const type = recorder.mimeType || "audio/webm";
    recorder = null;
    for (const track of sound.getTracks()) track.stop();
    recording(false);
    take([new File(pieces, "recording", { type })]);
  });
  recorder.start();
  recording(true);
}

function recording(is) {
  $("record").textContent = is ? "Stop recording" : "Record";
  $("record").classList.toggle("danger", is);
}

export function start(onChange) {
  changed = onChange;
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => { await take($("file").files); $("file").value = ""; });
  $("record").addEventListener("click", record);
  $("prompt").addEventListener("paste", (event) => {
    if (accepted.length && event.clipboardData.files.length) { event.preventDefault(); take(event.clipboardData.files); }
  });
  const area = $("playground");
  area.addEventListener("dragover", (event) => { if (accepted.length) { event.preventDefault(); $("composer").classList.add("drop"); } });
  area.addEventListener("dragleave", () => $("composer").classList.remove("drop"));
  area.addEventListener("drop", (event) => {
    $("composer").classList.remove("drop");
    if (accepted.length && event.dataTransfer.files.length) { event.preventDefault(); take(event.dataTransfer.files); }
  });
}
