// Small helpers, and the line chart. Text reaches the page only as text nodes and attributes, never as markup.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const $ = (selector, root = document) => root.querySelector(selector);

function make(space, name, attributes, children) {
  const node = space ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ?
      "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const h = (name, attributes, ...children) => make(false, name, attributes, children);
const s = (name, attributes, ...children) => make(true, name, attributes, children);

/** The bytes of a block of the page: gzip in base64. */
async function unpacked(id, root = document) {
  const raw = atob($("#" + CSS.escape(id), root).textContent);
  const bytes = Uint8Array.from(raw, (c) => c.charCodeAt(0));
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")))
    .arrayBuffer());
}
const asJson = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 10000) return (value / 1e3).toPrecision(3) + "k";
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1).replace("e-", "e−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}
/** A tick's text, with the digits that tell it from its neighbour. */
function tickText(value, step) {
  const digits = Math.ceil(-Math.log10(step) - 1e-9);
  const needsAll = digits > 2 && Math.abs(value) >= 0.001;
  return needsAll ? value.toFixed(Math.min(digits, 7)).replace("-", "−") : number(value);
}
const percent = (share) => share === null || share === undefined ?
  "–" : (100 * share).toFixed(share && share < 0.1 ? 1 : 0) + " %";

function tip(text, x, y) {
  const box = $("#tip");
  box.hidden = !text;
  if (!text) return;
  if (box.textContent !== text) box.textContent = text;
  const left = Math.min(x + 14, innerWidth - box.offsetWidth - 8), above = y + 16 + box.offsetHeight > innerHeight;
  box.style.transform = `translate(${Math.max(8, left)}px, ${above ? y - box.offsetHeight - 12 : y + 16}px)`;
}

/** Round values that divide [low, high] into about n parts. */
function ticks(low, high, n) {
  const rough = 0.7 * (high - low) / n || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9;
    i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function smooth(values) {
  const reach = Math.floor(values.length / 40);
  return reach < 1 ? values : values.map((value, at) => {
    if (value === null) return null;
    let sum = 0, count = 0;
    for (let i = Math.max(0, at - reach); i <= Math.min(values.length - 1, at + reach); i++) {
      if (values[i] !== null) { sum += values[i]; count++; }
    }
    return sum / count;
  });
}

const redraws = [];
/** Draw now, again when the width changes, and when the page's choices do. `draw` gets the width in pixels. */
function responsive(box, draw) {
  let width = 0;
  const again = () => { if (box.clientWidth) draw(width = box.clientWidth); };
  new ResizeObserver(() => { if (Math.abs(box.clientWidth - width) > 1) again(); }).observe(box);
  redraws.push(again);
}

/** A figure with lines over steps. Each series: {label, color, dashed, x, y, dots, error, last}. */
function lineChart({ title, unit = "", series, log = false, from = null, to = null, marks = [], xLabel }) {
  // 0 has no place on a logarithmic scale, and would pull the mean of its neighbours down: it is marked at the bottom.
  if (log) series = series.map((one) => ({ ...one, y: one.y.map((value) => value > 0 ? value : null),
    zero: one.x.filter((_, i) => one.y[i] === 0) }));
  series = series.filter((one) => one.y.some((value) => value !== null));
  if (!series.length) return null;
  const plot = h("div"), legend = h("ul", { class: "legend" }, series.map((one) => h("li", {},
    h("i", { class: `swatch ${one.dashed ? "dash" : ""} ${one.color}` }), one.label,
    h("b", {}, number((one.dots ? one.y : smooth(one.y)).findLast((value) => value !== null))),
    one.zero?.length ? ` (0 in ${one.zero.length} of ${one.x.length}: marks at the bottom)` : "")));
  const figure = h("figure", {}, h("figcaption", {}, title, h("span", { class: "unit" }, unit)), legend, plot);
  responsive(plot, (width) => plot.replaceChildren(drawLines(width, { title, series, log, from, to, marks, xLabel })));
  return figure;
}

function drawLines(width, { title, series, log, from, to, marks, xLabel }) {
  const height = 190, right = 10, top = 8, bottom = 24;
  const xs = series.flatMap((one) => one.x), scale = log ? Math.log10 : (value) => value;
  const ys = series.flatMap((one) => one.y.flatMap((value, i) => value === null ? []
    : one.error && one.error[i] ? [value - one.error[i], value + one.error[i]] : [value])).map(scale);
  const most = (values, f) => values.reduce((a, b) => f(a, b));
  const x0 = most(xs, Math.min), x1 = Math.max(most(xs, Math.max), x0 + 1e-9);
  if (log) { // a value near zero, such as the first step's, must not press the others together
    const low = [...ys].sort((a, b) => a - b)[Math.floor(ys.length / 10)] - 1;
    ys.forEach((y, i) => { ys[i] = Math.max(y, low); });
  }
  let y0 = from !== null ? scale(from) : most(ys, Math.min), y1 = to !== null ? scale(to) : most(ys, Math.max);
  const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 0.1;
  if (from === null) y0 -= room;
  if (to === null) y1 += room;
  const found = log && y1 - y0 < 1.3 ? ticks(10 ** y0, 10 ** y1, 4).filter((level) => level > 0) : log ?
    ticks(Math.ceil(y0), Math.floor(y1), 4).filter(Number.isInteger).map((e) => 10 ** e) : ticks(y0, y1, 4);
  const levels = found.length ? found : [log ? 10 ** ((y0 + y1) / 2) : y0];
  const texts = levels.map((level) => log ? number(level) : tickText(level, levels[1] - levels[0]));
  const left = 14 + 6.6 * Math.max(...texts.map((text) => text.length), 3);
  const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const py = (y) => top + (1 - (Math.max(y0, scale(y)) - y0) / (y1 - y0)) * (height - top - bottom);
  const parts = [];
  levels.forEach((level, i) => parts.push(
    s("line", { class: "rule", x1: left, x2: width - right, y1: py(level), y2: py(level) }),
    s("text", { x: left - 7, y: py(level) + 4, "text-anchor": "end" }, texts[i])));
  for (const x of ticks(x0, x1, Math.max(2, Math.min(6, width / 90)))) {
    parts.push(s("text", { x: px(x), y: height - 6, "text-anchor": "middle" }, number(x)));
  }
  for (const x of marks) parts.push(s("line", { class: "mark", x1: px(x), x2: px(x), y1: top, y2: height - bottom }));
  const path = (one, values) => {
    let d = "", pen = "M";
    values.forEach((y, i) => {
      if (y === null) return; // generators report more rarely than there are steps
      d += `${pen}${px(one.x[i]).toFixed(1)} ${py(y).toFixed(1)}`;
      pen = "L";
    });
    return d;
  };
  for (const one of series) {
    const dashed = one.dashed ? "dashed" : "", mean = one.dots ? one.y : smooth(one.y);
    for (const x of one.zero || []) parts.push(s("line", { class: `line zero ${one.color}`, x1: px(x), x2: px(x),
      y1: height - bottom - 7, y2: height - bottom }));
    if (mean !== one.y) parts.push(s("path", { class: `line raw ${one.color}`, d: path(one, one.y) }));
    parts.push(s("path", { class: `line ${dashed} ${one.color}`, d: path(one, mean) }));
    if (one.dots) one.y.forEach((y, i) => {
      const e = one.error && one.error[i];
      if (e) parts.push(s("line", { class: `line ${one.color}`, x1: px(one.x[i]), x2: px(one.x[i]), y1: py(y - e),
        y2: py(y + e) }));
      parts.push(s("circle", { class: `dot ${one.color}`, cx: px(one.x[i]), cy: py(y), r: 3.4 }));
    });
  }
  const cursor = s("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  const places = [...new Set(xs)].sort((a, b) => a - b);
  const first = series.map((one) => `${one.label}: ${number(one.y.find((v) => v !== null))} at first, ` +
    `${number(one.y.findLast((v) => v !== null))} at last`).join("; ");
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img",
    "aria-label": `${title}. ${first}. Arrow keys read single values.` }, parts, cursor);
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = places[at], box = svg.getBoundingClientRect();
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, px(x));
    cursor.setAttribute("visibility", "visible");
    const lines = series.flatMap((one) => { const i = one.x.indexOf(x), y = one.zero?.includes(x) ? 0 : one.y[i];
      return i < 0 || y === null ? [] : [`${one.label} ${number(y)}`]; });
    tip(`${xLabel} ${number(x)}\n${lines.join("\n")}`, box.left + px(x), box.top + 40);
  };
  const hide = () => { cursor.setAttribute("visibility", "hidden"); tip(""); };
  svg.addEventListener("pointermove", (event) => {
    const x = x0 + (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right) * (x1 - x0);
    let low = 0, high = places.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (places[mid] < x) low = mid + 1; else high = mid; }
    show(low > 0 && x - places[low - 1] < places[low] - x ? low - 1 : low);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") hide();
    if (step) { event.preventDefault(); show(at + step); }
  });
  return svg;
}
