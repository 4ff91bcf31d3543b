// The panels of curves, the timeline, staleness, and the flow of the ledger.
"use strict";

const letter = (run) => String.fromCharCode(65 + run);
const WORDS = { train: "trains", wait: "waits for groups", publish: "stages weights", checkpoint: "writes a checkpoint",
  other: "other", decode: "decode", grading: "wait for scores", environment: "wait for environments",
  weights: "wait for weights", leases: "wait for leases (queue full)" };

function drawPanels(runs) {
  const axis = $("#axis").value, xLabel = axis === "step" ? "step" : "second";
  for (const box of document.querySelectorAll("[data-panels]")) {
    const section = box.dataset.panels, panels = DATA.panels.filter((panel) => panel.section === section);
    const figures = panels.map((panel) => figureOf(runs, panel, axis, xLabel));
    if (section === "learning") figures.push(anyMetric(runs, axis, xLabel));
    if (section === "staleness") figures.push(...lagCharts(runs));
    box.replaceChildren(...figures.filter(Boolean));
  }
}

function figureOf(runs, panel, axis, xLabel) {
  const series = [], many = runs.length > 1;
  runs.forEach((run, r) => {
    const evals = Object.entries(panel.evals ? run.evals : {});
    evals.forEach(([name, one], i) => series.push({ label: many ? `${letter(r)} ${name}` : name, x: one[axis],
      y: one.accuracy,
      color: `c${many ? r : i}`, dots: true, error: one.se }));
    panel.curves.forEach(({ key, label, least }, i) => {
      const y = run.columns[key];
      if (!y || (least !== null && !y.some((value) => value >= least))) return;
      series.push({ label: many ? `${letter(r)} ${label}` : label, x: run.columns[axis], y, dashed: many ? i > 0 ||
        evals.length : i > 1,
        color: many ? `c${r}` : `c${evals.length + i}` });
    });
  });
  const marks = axis === "step" && !many ? runs[0].starts.map((step) => step - 0.5) : [];
  return lineChart({ ...panel, series, marks, xLabel });
}

let chosenMetric = "";
function anyMetric(runs, axis, xLabel) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.columns)))].filter((key) => key !== "step").sort();
  if (!keys.includes(chosenMetric)) {
    chosenMetric = ["reward/mean", "accuracy/mean", "loss/policy"].find((key) => keys.includes(key)) || keys[0];
  }
  const place = h("div"), about = h("p", { class: "who" });
  const draw = () => {
    const curves = [{ key: chosenMetric, label: chosenMetric, least: null }];
    const figure = figureOf(runs, { title: chosenMetric, curves }, axis, xLabel);
    place.replaceChildren(figure ? figure.lastElementChild : h("p", { class: "empty" }, "No value."));
    about.textContent = DATA.descriptions[chosenMetric] || "";
  };
  const pick = h("select", { "aria-label": "Metric", onchange: (event) =>
    { chosenMetric = event.target.value; draw(); } },
    keys.map((key) => h("option", { selected: key === chosenMetric }, key)));
  requestAnimationFrame(draw);
  return h("figure", { class: "two" }, h("figcaption", {}, h("span", {}, "Any metric"), pick), place, about);
}

/** Bars or dots by staleness: the share of tokens, and the mismatch. */
function lagCharts(runs) {
  const many = runs.length > 1;
  const by = (title, unit, pick, options) => lineChart({ title, unit, xLabel: "staleness", ...options,
    series: runs.filter((run) => run.lags.length).map((run) =>
      ({ label: many ? letter(runs.indexOf(run)) : "all steps", dots: true,
      color: `c${runs.indexOf(run)}`, x: run.lags.map((one) => one.lag),
        y: run.lags.map((one) => pick(one, run)) })) });
  const total = (run) => run.lags.reduce((sum, one) => sum + one.tokens, 0);
  return [by("Trained tokens by staleness", "share", (one, run) => one.tokens / total(run), { from: 0 }),
    by("Mismatch by staleness", "KL, nats", (one) => one.kl, { log: true }),
    by("Effective sample size by staleness", "share", (one) => one.ess, { to: 1 })];
}

const timelines = (runs) => $("#timelines").replaceChildren(...runs.map((run, r) =>
  timeline(run, runs.length > 1 ? r : null))
  .filter(Boolean));

function timeline(run, index) {
  const t = run.timeline, bars = t.begin.length;
  if (!bars) return null;
  const wide = t.begin.map((begin, i) => t.end[i] - begin), whole = wide.reduce((a, b) => a + b, 0) || 1;
  const mean = (shares) => {
    const known = wide.map((w, i) => shares[i] === null ? 0 : w), sum = known.reduce((a, b) => a + b, 0);
    return sum ? shares.reduce((total, share, i) => total + (share || 0) * known[i], 0) / sum : null;
  };
  const stack = (title, lane) => ({ title, tall: 46, parts: Object.entries(lane).map(([name, shares]) =>
    ({ name, shares, mean: mean(shares) }))
    .filter((part) => part.mean !== null && (part.mean >= 0.0005 || part.name === "train")) });
  const thin = (title, name) => ({ title, tall: 13, parts: [{ name, shares: t[name], mean: mean(t[name]) }] });
  const lanes = [stack("Learner", t.learner), stack("Generators", t.generators), thin("Scores awaited", "grading"),
    thin("Environments awaited", "environment"), thin("Weights sent", "transfer")]
    .filter((lane) => lane.parts.length && (lane.tall > 20 || lane.parts[0].mean >= 0.002));
  const plot = h("div");
  const legends = lanes.filter((lane) => lane.tall > 20).map((lane) =>
    h("ul", { class: "legend", "aria-label": lane.title },
    h("li", {}, h("strong", {}, lane.title)), lane.parts.filter((part) => part.mean >= 0.0005).map((part) => h("li", {},
      h("i", { class: `swatch k-${part.name}` }), WORDS[part.name], h("b", {}, percent(part.mean))))));
  responsive(plot, (width) => plot.replaceChildren(drawTimeline(width, t, lanes)));
  return h("figure", { class: "wide" }, h("figcaption", {}, index === null ? "The whole run" :
    h("span", {}, h("i", { class: `key c${index}` }, letter(index)), run.name),
      h("span", { class: "unit" }, `${number(whole)} s in steps, start-ups too`)), legends, plot);
}

function drawTimeline(width, t, lanes) {
  const narrow = width < 560, left = narrow ? 0 : 164, gap = narrow ? 24 : 10, count = t.begin.length, parts = [];
  const t0 = t.begin[0], t1 = Math.max(t.end[count - 1], t0 + 1e-9), px = (x) => left +
    (x - t0) / (t1 - t0) * (width - left);
  let top = narrow ? 18 : 4;
  for (const lane of lanes) {
    parts.push(s("text", { class: "strong", x: 0, y: narrow ? top - 5 : top + lane.tall / 2 + 4 }, lane.title));
    parts.push(s("rect", { x: left, y: top, width: width - left, height: lane.tall, fill: "var(--soft)" }));
    const base = new Array(count).fill(0);
    for (const part of lane.parts) {
      let d = "";
      for (let i = 0; i < count; i++) {
        if (!part.shares[i]) continue;
        const tall = part.shares[i] * lane.tall, y = top + lane.tall - base[i] - tall, x = px(t.begin[i]);
        const [left, width] = [x.toFixed(2), (px(t.end[i]) - x + 0.15).toFixed(2)];
        d += `M${left} ${y.toFixed(2)}h${width}v${tall.toFixed(2)}H${left}z`;
        base[i] += tall;
      }
      parts.push(s("path", { class: `area k-${part.name}`, d }));
    }
    top += lane.tall + gap;
  }
  const height = top + 14;
  for (const x of ticks(t0, t1, Math.max(2, Math.min(10, width / 110)))) parts.push(s("text", { x: px(x), y: height - 2,
    "text-anchor": x - t0 < (t1 - t0) * 0.02 ? "start" : px(x) > width - 16 ? "end" : "middle" }, `${number(x)} s`));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0,
    "aria-label": "Timeline. " + lanes.map((lane) => lane.title + ": " + lane.parts.map((part) =>
      `${WORDS[part.name] || ""} ${percent(part.mean)}`).join(", ")).join(". ") }, parts);
  let at = -1;
  const show = (index, x, y) => {
    at = Math.max(0, Math.min(count - 1, index));
    const [first, last] = t.steps[at], lines = lanes.flatMap((lane) => [`${lane.title}: ` + lane.parts
      .filter((part) => part.shares[at]).map((part) =>
        `${WORDS[part.name] || ""} ${percent(part.shares[at])}`).join(", ")]);
    const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    tip(`${steps}, second ${number(t.begin[at])} to ${number(t.end[at])}\n` + lines.join("\n"), x, y);
  };
  svg.addEventListener("pointermove", (event) => {
    const x = t0 + (event.clientX - svg.getBoundingClientRect().left - left) / (width - left) * (t1 - t0);
    const found = t.end.findIndex((end) => end >= x);
    show(found < 0 ? count - 1 : found, event.clientX, event.clientY);
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], box = svg.getBoundingClientRect();
    if (step) { event.preventDefault(); show(at + step, box.left + px(t.begin[Math.max(0, at + step)] || t0), box.top +
      30); }
  });
  for (const name of ["pointerleave", "blur"]) svg.addEventListener(name, () => tip(""));
  return svg;
}

/** The ends of what was issued: name -> count, or causes with counts. */
function endsOf(account) {
  const total = account.issued ?? account.received ?? 0, ends = [];
  for (const name of ["trained", "masked", "failed", "filtered", "dropped"]) {
    const value = account[name] ?? 0;
    const causes = typeof value === "object" ? Object.entries(value).filter(([, count]) => count) : [];
    const count = typeof value === "object" ? causes.reduce((sum, [, n]) => sum + n, 0) : value;
    if (count) ends.push({ name, count, causes: causes.sort((a, b) => b[1] - a[1]) });
  }
  const open = ["in_flight", "queued", "taken"].map((name) =>
    [name.replace("_", " "), account[name] ?? 0]).filter(([, n]) => n);
  if (open.length) ends.push({ name: "open", count: open.reduce((sum, [, n]) => sum + n, 0), causes: open });
  return { total, ends };
}

function flows(runs) {
  const unit = $("#unit").value;
  $("#flows").replaceChildren(...runs.map((run, r) => {
    const { total, ends } = endsOf(run.ledger[unit] || {}), plot = h("div");
    if (!total) return h("p", { class: "empty" }, `${run.name} has no ledger yet.`);
    responsive(plot, (width) => plot.replaceChildren(drawFlow(width, unit, total, ends)));
    return h("figure", { class: "wide" }, h("figcaption", {}, runs.length > 1 ?
      h("span", {}, h("i", { class: `key c${r}` }, letter(r)), run.name)
      : `What became of ${unit}`, h("span", { class: "unit" },
        `${total.toLocaleString("en")} ${unit === "tokens" ? "received" : "issued"}`)), plot);
  }));
}

function drawFlow(width, unit, total, ends) {
  const narrow = width < 560, least = 17, thick = 12, parts = [], labels = [];
  const scale = Math.max(150, 26 * ends.reduce((n, end) => n + Math.max(1, end.causes.length), 0)) - 10;
  const x1 = narrow ? 0 : 4, x2 = narrow ? width * 0.3 : width * 0.36, x3 = narrow ? width * 0.66 : width * 0.7;
  const high = (count) => Math.max(1.5, count / total * scale);
  const link = (xa, ya, ha, xb, yb, hb, kind) => s("path", { class: `link k-${kind}`,
    d: `M${xa} ${ya}C${(xa + xb) / 2} ${ya} ${(xa + xb) / 2} ${yb} ${xb} ${yb}` +
    `v${hb}C${(xa + xb) / 2} ${yb + hb} ${(xa + xb) / 2} ${ya + ha} ${xa} ${ya + ha}z` });
  const node = (x, y, height, kind) => s("rect", { x, y, width: thick, height, rx: 2, class: `area k-${kind}` });
  const label = (x, y, name, count) => s("text", { x, y, class: "halo" },
    s("tspan", { fill: "var(--ink)" }, name + " "),
    s("tspan", { "font-weight": 600 }, narrow && count >= 1e5 ? number(count) : count.toLocaleString("en")),
    narrow ? "" : s("tspan", {}, ` · ${percent(count / total)}`));
  let from = 8, at = 8, below = 8;
  parts.push(node(x1, 8, high(total), "issued"));
  for (const end of ends) {
    const height = high(end.count), y = at;
    parts.push(link(x1 + thick, from, Math.min(height, 8 + high(total) - from), x2, y, height, end.name),
      node(x2, y, height, end.name));
    labels.push(label(x2 + thick + 7, y + Math.max(height / 2, 5) + 4, end.name, end.count));
    let out = y;
    for (const [cause, count] of end.causes) {
      const of = high(count), place = Math.max(below, out);
      parts.push(link(x2 + thick, out, of, x3, place, of, end.name), node(x3, place, of, end.name));
      labels.push(label(x3 + thick + 7, place + Math.max(of / 2, 5) + 4, cause.replaceAll("_", " "), count));
      out += of;
      below = place + Math.max(of, least) + 4;
    }
    from += end.count / total * scale;
    at = Math.max(y + Math.max(height, least) + 5, 0);
  }
  const height = Math.max(at, below, 8 + high(total)) + 6;
  const words = ends.map(({ name, count, causes }) => `${count} ${name}` + (causes.length
    ? ` (${causes.map(([cause, n]) => `${n} ${cause}`).join(", ")})` : ""));
  return s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `Of ${total} ${unit}: ${words.join(", ")}` }, parts, labels);
}

function drawAll() {
  drawPanels(DATA.runs);
  timelines(DATA.runs);
  flows(DATA.runs);
}

/** Show what has changed since the server made the page, every few seconds. */
async function follow() {
  let stamp = await (await fetch("data/stamp")).text(), wait = 3000;
  for (;;) {
    await new Promise((done) => setTimeout(done, wait));
    try {
      const now = await (await fetch("data/stamp")).text();
      $("#live").textContent = "live";
      if (now === stamp) continue;
      const began = performance.now();
      const page = new DOMParser().parseFromString(await (await fetch("./")).text(), "text/html");
      DATA = asJson(await unpacked("data", page));
      for (const part of [".intro", "#notes", "#ledger details"]) $(part).replaceChildren(...$(part, page).childNodes);
      redraws.length = 0;
      drawAll();
      await refreshBrowser();
      stamp = now;
      wait = Math.max(3000, 20 * (performance.now() - began)); // the machine trains, too
    } catch { $("#live").textContent = "server gone"; }
  }
}

let DATA = null;
async function start() {
  DATA = asJson(await unpacked("data"));
  drawAll();
  $("#axis").addEventListener("change", () => drawPanels(DATA.runs));
  $("#unit").addEventListener("change", () => flows(DATA.runs));
  const themes = ["", "light", "dark"], names = ["as the system", "light", "dark"];
  let theme = 0;
  try { theme = Math.max(0, themes.indexOf(localStorage.getItem("theme") || "")); } catch { theme = 0; }
  const dress = () => {
    document.documentElement.dataset.theme = themes[theme];
    $("#theme").setAttribute("aria-label", `Colours: ${names[theme]}`);
    $("#theme").title = `Colours: ${names[theme]}`;
  };
  $("#theme").addEventListener("click", () => {
    theme = (theme + 1) % 3;
    try { localStorage.setItem("theme", themes[theme]);
      } catch { /* a file may have no storage: this page forgets it */ }
    dress();
  });
  dress();
  await startBrowser();
  await openLinked();
  addEventListener("hashchange", openLinked);
  document.documentElement.dataset.ready = "yes";
  if (DATA.served) { $("#live").hidden = false; follow(); }
}
start().catch((error) => {
  document.documentElement.dataset.failed = String(error);
  $("main").prepend(h("p", { class: "bad" },
    `This page can't be shown: ${error}. It needs a browser of 2023 or later.`));
});
