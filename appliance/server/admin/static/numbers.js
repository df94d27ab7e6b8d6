// The Prometheus text, and what is computed from it. No DOM here.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

// name → [{labels, value}]
export function read(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] || "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value });
  }
  return found;
}

export function sum(metrics, name, labels = {}) {
  const wanted = Object.entries(labels);
  return (metrics.get(name) || [])
    .filter((sample) => wanted.every(([label, value]) => sample.labels[label] === value))
    .reduce((total, sample) => total + sample.value, 0);
}

// Sums by the values of one label.
export function by(metrics, name, label) {
  const found = {};
  for (const sample of metrics.get(name) || []) found[sample.labels[label]] = (found[sample.labels[label]] || 0) + sample.value;
  return found;
}

// Cumulative buckets of a histogram over all its series: [[bound, count], …] in order of the bounds.
export function buckets(metrics, name) {
  const found = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) || []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    found.set(bound, (found.get(bound) || 0) + value);
  }
  return [...found].sort(([one], [two]) => one - two);
}

// What came in between two states of a histogram. A service that began anew counts from 0.
export function between(before, after) {
  const old = new Map(before);
  const fell = after.some(([bound, count]) => count < (old.get(bound) || 0));
  return fell ? after : after.map(([bound, count]) => [bound, count - (old.get(bound) || 0)]);
}

// The value below which the share of all lies, linear within its bucket, as Prometheus does it; null of nothing.
export function quantile(cumulative, share) {
  const total = cumulative.length ? cumulative[cumulative.length - 1][1] : 0;
  if (!total) return null;
  const rank = share * total;
  let low = 0, before = 0;
  for (const [bound, count] of cumulative) {
    if (count >= rank) {
      if (bound === Infinity) return low;
      return count === before ? bound : low + (bound - low) * ((rank - before) / (count - before));
    }
    [low, before] = [bound, count];
  }
  return low;
}

// Growth per second of a counter that may begin anew.
export const rate = (before, after, seconds) => (seconds > 0 ? Math.max(0, after < before ? after : after - before) / seconds : 0);

export function count(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(value >= 100000 ? 0 : 1)}k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(value >= 100 ? 0 : 1);
}

export function seconds(value) {
  if (value === null) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 120 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${(value / 60).toFixed(1)} min`;
}

// A quantile as text. Below the first bound nothing finer is known than that bound.
export function quantileText(cumulative, share) {
  const value = quantile(cumulative, share);
  const first = cumulative.length ? cumulative[0][0] : 0;
  return value !== null && value < first ? `< ${seconds(first)}` : seconds(value);
}

export const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
