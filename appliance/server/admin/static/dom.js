// Elements with text. Nothing here, or anywhere in the page, reads text as HTML.

export const $ = (id) => document.getElementById(id);

// el("p", {class: "x", onclick: f}, "text", child, null)
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A button that copies a text to the clipboard and says so for a moment.
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "link", "aria-label": label, onclick: async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  } }, "copy");
  return button;
}

// A line of values over time, 0 at the bottom; decoration beside a number that is told as text.
export function sparkline(values, most = 0) {
  const width = 120, height = 32;
  const top = Math.max(most, ...values, 1e-9);
  const step = width / Math.max(values.length - 1, 1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)},${(height - 1 - (value / top) * (height - 3)).toFixed(1)}`);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length > 1) {
    drawing.append(svg("polygon", { points: `0,${height} ${points.join(" ")} ${width},${height}` }), svg("polyline", { points: points.join(" ") }));
  }
  return drawing;
}
