// Markdown of the model as elements. marked.js splits the text into tokens; HTML in it is shown as text.

import { copyButton, el } from "./dom.js";
import { Lexer } from "./marked.js";

const MOST = 60000; // characters; a longer text is shown as plain paragraphs
const LINKS = /^(?:https?:|mailto:)/i;

export function markdown(text) {
  if (text.length > MOST) return text.split(/\n{2,}/).map((part) => el("p", { class: "plain" }, part));
  return blocks(new Lexer({ gfm: true }).lex(text));
}

const blocks = (tokens) => tokens.flatMap((token) => (BLOCKS[token.type] || paragraph)(token));
const inline = (tokens) => tokens.flatMap((token) => (INLINE[token.type] || raw)(token));
const raw = (token) => [token.raw];
const wrapped = (tag) => (token) => [el(tag, {}, inline(token.tokens))];
const paragraph = (token) => [el("p", {}, token.tokens ? inline(token.tokens) : token.raw)];

const BLOCKS = {
  space: () => [],
  def: () => [],
  hr: () => [el("hr")],
  heading: (token) => [el(`h${Math.min(token.depth + 2, 6)}`, {}, inline(token.tokens))],
  code: (token) => [codeBlock(token.text, token.lang)],
  blockquote: (token) => [el("blockquote", {}, blocks(token.tokens))],
  html: (token) => [el("p", { class: "plain" }, token.raw.trimEnd())],
  text: (token) => (token.tokens ? inline(token.tokens) : [token.text]), // in a list item without blank lines
  list: (token) => [el(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? token.start : null },
    token.items.map((item) => el("li", {}, blocks(item.tokens))))],
  checkbox: (token) => [el("input", { type: "checkbox", disabled: true, checked: token.checked, "aria-label": "task" }), " "],
  table: (token) => [el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, el("table", {},
    el("thead", {}, el("tr", {}, token.header.map((cell) => tableCell("th", cell)))),
    el("tbody", {}, token.rows.map((cells) => el("tr", {}, cells.map((cell) => tableCell("td", cell)))))))],
};

const INLINE = {
  text: (token) => (token.tokens ? inline(token.tokens) : [token.text]),
  escape: (token) => [token.text],
  strong: wrapped("strong"),
  em: wrapped("em"),
  del: wrapped("del"),
  codespan: (token) => [el("code", {}, token.text)],
  br: () => [el("br")],
  link: (token) => (LINKS.test(token.href)
    ? [el("a", { href: token.href, rel: "noopener noreferrer", target: "_blank" }, inline(token.tokens))]
    : [token.raw]),
};

const tableCell = (tag, { tokens, align }) => el(tag, { class: align && align !== "left" ? `align-${align}` : null }, inline(tokens));

function codeBlock(text, language) {
  return el("figure", { class: "block" },
    el("figcaption", {}, el("span", {}, (language || "").split(/\s/)[0] || "text"), copyButton(() => text, "Copy code")),
    el("pre", { class: "code", tabindex: "0" }, el("code", {}, text)));
}
