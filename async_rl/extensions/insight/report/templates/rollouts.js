// The rollout browser: an index that is filtered, a table of what is left, and one rollout with its tokens.
"use strict";

const PAGE_ROWS = 100, MOST_TOKENS = 4000, MOST_STEPS = 6;
const HIDDEN = /[^\n\t\P{Cc}]|[\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/u;
const COLUMNS = { step: "step", row: "row", reward: "reward", tokens: "tokens", stale: "staleness",
  finish: "ended by" };
const RANGES = { step: "step", reward: "reward", accuracy: "accuracy", tokens: "tokens", stale: "staleness" };
/** What only rollouts of training have. Answers of evaluations have their accuracy in the list instead. */
const TRAINING_ONLY = new Set(["stale", "cause"]);
const columnsShown = () => Object.entries(COLUMNS).map(([name, label]) => browser.isEvaluation && name === "stale"
  ? ["accuracy", "accuracy"] : [name, label]);
const browser = { run: 0, index: null, chunks: new Map(), found: [], page: 0, open: -1, sort: "step", down: false,
  mode: "entropy" };

/** Text with every control character and change of direction shown as its code, so that it has no effect. */
function safe(text) {
  if (!HIDDEN.test(text)) return [text];
  return [...text].map((c) => HIDDEN.test(c) ? h("span", { class: "hid" }, "U+" +
    c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")) : c);
}

const asText = (value) => typeof value === "object" ? JSON.stringify(value) : String(value);

async function startBrowser() {
  if (!DATA.rollouts.some((count) => count)) return;
  await chooseRun(Math.max(0, DATA.rollouts.findIndex((count) => count)));
}

async function chooseRun(run) {
  browser.run = run;
  browser.index = DATA.rollouts[run] ? asJson(await bytesOf(`index-${run}`)) : null;
  buildBrowser();
  const [first] = browser.found;
  if (first !== undefined && canOpen(first)) await openRollout(first);
}

/** Show rollouts that the run has made since; the filters, the order and the open rollout stay. */
async function refreshBrowser() {
  if (!browser.index) { await startBrowser(); return; }
  browser.index = asJson(await bytesOf(`index-${browser.run}`));
  browser.chunks.clear();
  if (setsOf(browser.index).join("\n") !== browser.sets.join("\n")) { buildBrowser(); return; }
  const page = browser.page;
  filter();
  browser.page = Math.min(page, Math.max(0, Math.ceil(browser.found.length / PAGE_ROWS) - 1));
  drawList();
}

/** A block of data: of the page, or of the server that made it. */
async function bytesOf(id) {
  if ($("#" + CSS.escape(id))) return unpacked(id);
  const answer = await fetch(`data/${id}`);
  if (!answer.ok) throw new Error(`${id}: ${answer.status} ${await answer.text()}`);
  return new Uint8Array(await answer.arrayBuffer());
}

function buildBrowser() {
  const index = browser.index, apply = () => filter();
  const range = (name, label) => {
    const known = index[name].filter((value) => value !== null);
    if (!known.length) return null;
    const low = known.reduce((a, b) => Math.min(a, b), Infinity),
      high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    const box = (end, hint) => h("input", { type: "number", step: "any", name: `${name}-${end}`,
      placeholder: number(hint),
      "aria-label": `${label}, ${end === "min" ? "at least" : "at most"}`, oninput: apply });
    return h("div", { class: "range", role: "group", "aria-label": label, "data-of": name }, label,
      h("span", {}, box("min", low), "–", box("max", high)));
  };
  const choice = (name, label) => {
    const used = [...new Set(index[name])].map((code) => index.names[code]);
    if (used.length < 2) return null;
    return h("label", { "data-of": name }, label, h("select", { name, onchange: apply },
      h("option", { value: "*" }, "any"), used.sort().map((value) => h("option", { value }, value || "none"))));
  };
  const sets = browser.sets = setsOf(index);
  const form = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    DATA.runs.length > 1 ? h("label", {}, "run", h("select", { onchange: (event) =>
      chooseRun(Number(event.target.value)) },
      DATA.runs.map((run, r) => h("option", { value: r, selected: r === browser.run, disabled: !DATA.rollouts[r] },
        run.name)))) : null,
    sets.length > 1 ? h("label", {}, "answers of", h("select", { name: "set", onchange: apply },
      sets.map((name) => h("option", { value: name }, name ? `evaluation ${name}` : "training")))) : null,
    Object.entries(RANGES).map(([name, label]) => range(name, label)),
    h("label", {}, "dataset row", h("input", { type: "number", name: "row", min: 0, step: 1, oninput: apply })),
    choice("finish", "ended by"), choice("cause", "left out for"),
    h("label", {}, "text", h("select", { name: "text", onchange: apply }, h("option", { value: "*" }, "any"),
      h("option", { value: "here" }, "can be read"))),
    h("button", { type: "reset", onclick: () => {
      const { set } = form.elements, name = set?.value;  // a choice of what to look at, not a filter of it
      setTimeout(() => { if (set) set.value = name; apply(); });
    } }, "Reset"));
  const list = h("div", { class: "list" }), detail = h("div", { class: "detail-box", id: "rollout", tabindex: -1 },
    h("p", { class: "empty" }, "Choose a rollout in the list. Arrow keys move there."));
  $("#browser").replaceChildren(form, h("div", { class: "pair" }, list, detail));
  browser.form = form;
  browser.list = list;
  browser.open = -1;
  filter();
}

/** The names of the evaluation sets in an index; "" is training. */
const setsOf = (index) => [...new Set(index.set)].map((code) => index.names[code]).sort();

const canOpen = (i) => browser.index.chunk[i] >= 0;

function filter() {
  const index = browser.index, values = new FormData(browser.form), count = index.step.length;
  const set = index.names.indexOf(values.get("set") ?? browser.sets[0]), tests = [(i) => index.set[i] === set];
  browser.isEvaluation = index.names[set] !== "";
  const acts = (name) => !(browser.isEvaluation && TRAINING_ONLY.has(name));
  for (const box of browser.form.querySelectorAll("[data-of]")) box.hidden = !acts(box.dataset.of);
  if (!acts(browser.sort)) browser.sort = "step";
  for (const name of Object.keys(RANGES).filter(acts)) {
    const column = index[name], low = values.get(`${name}-min`), high = values.get(`${name}-max`);
    if (low !== "" && low !== null) tests.push((i) => column[i] !== null && column[i] >= Number(low));
    if (high !== "" && high !== null) tests.push((i) => column[i] !== null && column[i] <= Number(high));
  }
  browser.total = index.set.filter((one) => one === set);
  if (values.get("row")) { const row = Number(values.get("row")); tests.push((i) => index.row[i] === row); }
  for (const name of ["finish", "cause"].filter(acts)) {
    const value = values.get(name);
    if (value !== null && value !== "*") { const code = index.names.indexOf(value);
      tests.push((i) => index[name][i] === code); }
  }
  if (values.get("text") === "here") tests.push(canOpen);
  const found = [];
  for (let i = 0; i < count; i++) if (tests.every((test) => test(i))) found.push(i);
  browser.found = found;
  order();
}

function order() {
  const column = browser.index[browser.sort], sign = browser.down ? -1 : 1;
  browser.found.sort((a, b) => canOpen(b) - canOpen(a) // first those with a text to read
    || sign * ((column[a] ?? -Infinity) - (column[b] ?? -Infinity)) || a - b);
  browser.page = 0;
  drawList();
}

const count = (list) => list.length.toLocaleString("en");

function drawList() {
  const { index, found, page } = browser, first = page * PAGE_ROWS,
    pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
  const columns = columnsShown(), head = columns.map(([name, label]) =>
    h("th", { scope: "col", "aria-sort": browser.sort !== name ? "none"
    : browser.down ? "descending" : "ascending" }, h("button", { type: "button", onclick: () => {
    browser.down = browser.sort === name && !browser.down;
    browser.sort = name;
    order();
  } }, label + (browser.sort === name ? (browser.down ? " ↓" : " ↑") : ""))));
  const rows = found.slice(first, first + PAGE_ROWS).map((i, at) => {
    const cause = index.names[index.cause[i]], cells = { finish: index.names[index.finish[i]] +
      (cause ? `, left out: ${cause}` : "") };
    return h("tr", { tabindex: at ? -1 : 0, "data-i": i, "aria-selected": String(i === browser.open),
      class: canOpen(i) ? null : "dim" },
      columns.map(([name]) => h("td", {}, ...safe(cells[name] ?? number(index[name][i])))));
  });
  const go = (to) => { browser.page = to; drawList(); };
  const choose = (row) => { if (row) { row.focus(); openRollout(Number(row.dataset.i)); } };
  browser.list.replaceChildren(h("div", { class: "rows" }, h("table", { role: "grid", "aria-label": "Rollouts",
    onclick: (event) => choose(event.target.closest("tbody tr")), onkeydown: (event) => {
      const row = event.target.closest("tbody tr");
      if (!row) return;
      const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling, Enter: row,
        " ": row }[event.key];
      if (next !== undefined) { event.preventDefault(); choose(next); }
    } }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows))),
    h("div", { class: "pager" }, h("button", { type: "button", disabled: page === 0, "aria-label": "Rows before",
      onclick: () => go(page - 1) }, "‹"),
      h("span", { role: "status" }, `${count(found)} of ${count(browser.total)} ` +
        `${browser.isEvaluation ? "answers" : "rollouts"} · page ${page + 1} of ${pages}`),
      h("button", { type: "button", disabled: page + 1 >= pages, "aria-label": "Next rows", onclick: () =>
        go(page + 1) }, "›")));
}

async function chunkOf(number) {
  const id = `chunk-${browser.run}-${number}`;
  if (!browser.chunks.has(id)) {
    if (browser.chunks.size > 40) browser.chunks.clear();
    const bytes = await bytesOf(id), size = new DataView(bytes.buffer).getUint32(0, true);
    const chunk = asJson(bytes.subarray(4, 4 + size));
    if (chunk.columns) readColumns(chunk, bytes.subarray(4 + size));
    browser.chunks.set(id, chunk);
  }
  return browser.chunks.get(id);
}

async function openRollout(i) {
  const index = browser.index, box = $("#rollout");
  browser.open = i;
  for (const row of browser.list.querySelectorAll("tbody tr")) {
    row.setAttribute("aria-selected", String(Number(row.dataset.i) === i));
    row.tabIndex = Number(row.dataset.i) === i ? 0 : -1;
  }
  if (!canOpen(i)) { box.replaceChildren(...summary(i), h("p", { class: "empty" }, index.chunk[i] === -2
    ? "Its text is not in this file; async-rl report --serve shows it."
    : "Its text was not recorded; log.rollouts_every and log.rollouts_groups say which are."));
    return;
  }
  let chunk;
  try { chunk = await chunkOf(index.chunk[i]); } catch (error) { box.replaceChildren(h("p", { class: "bad" },
    String(error))); return; }
  if (browser.open !== i) return;
  const over = browser.index.names[index.set[i]] ? answersOver(i) : [], record = chunk.records[index.slot[i]];
  box.replaceChildren(...summary(i), ...recordView(record, chunk, over.length > 1 ? besideEachOther(over, i) : null));
}

/** The answers with the same number to the same row of an evaluation set, by step. */
function answersOver(i) {
  const index = browser.index, found = [];
  for (let j = 0; j < index.step.length; j++) if (index.set[j] === index.set[i] &&
    index.position[j] === index.position[i] && index.index[j] === index.index[i]) found.push(j);
  return found;
}

/** Columns with the answers of a row over the steps: the open one, and others evenly over the steps. */
function besideEachOther(over, i) {
  const hold = h("div", { class: "beside", role: "group", "aria-label": "The row's answers by step" });
  const show = (chosen) => hold.replaceChildren(...chosen.map((j) => answerColumn(j, j === i)));
  const last = over.length - 1, evenly = Array.from({ length: MOST_STEPS }, (_, k) =>
    over[Math.round(k * last / (MOST_STEPS - 1))]);
  show(over.length <= MOST_STEPS ? over : over.filter((j) => j === i || evenly.includes(j)));
  const all = over.length <= MOST_STEPS ? null : h("button", { type: "button", onclick: (event) => {
    event.target.remove(); show(over); } }, `All ${over.length} steps`);
  return [h("h3", {}, "Answers by step"), hold, all].filter(Boolean);
}

function answerColumn(j, isOpen) {
  const index = browser.index, accuracy = index.accuracy[j], text = h("div", { class: "say", tabindex: 0 }, "…");
  const say = (...parts) => text.replaceChildren(...parts);
  if (!canOpen(j)) say(h("span", { class: "dim" }, "Not in this file; async-rl report --serve shows it."));
  else chunkOf(index.chunk[j]).then((chunk) => {
    const { response, sequences } = chunk.records[index.slot[j]];
    say(...(response === null ? [h("span", { class: "dim" }, "No answer.")]
      : safe(sequences ? sequences.join("\n") : response)));
  }).catch((error) => say(h("span", { class: "bad" }, String(error))));
  return h("div", { class: isOpen ? "at" : null }, h("p", { class: "who" }, h("b", {}, `step ${index.step[j]}`), " ",
    h("span", { class: accuracy >= 1 ? "good" : accuracy > 0 ? null : "bad" }, `accuracy ${number(accuracy)}`),
    index.tokens[j] === null ? "" : `, ${index.tokens[j]} tokens`), text);
}

/** The part of the page's address that opens a rollout: its step, position and number, the run if not the first, and
 *  the evaluation set, if it is of one. */
const linkOf = (i) => {
  const set = browser.index.names[browser.index.set[i]];
  return `#rollout=${[browser.index.step[i], browser.index.position[i], browser.index.index[i],
    ...(browser.run || set ? [browser.run] : []), ...(set ? [encodeURIComponent(set)] : [])].join(".")}`;
};

/** Let the list show the rollouts of a set. */
function showSet(name) {
  const select = browser.form.elements.set;
  if (select && select.value !== name) { select.value = name; filter(); }
}

/** Open the rollout that the page's address names, whatever the filters hide. */
async function openLinked() {
  const [, ...words] = location.hash.match(/^#rollout=(\d+)\.(\d+)\.(\d+)(?:\.(\d+)(?:\.(.+))?)?$/) || [];
  if (!words.length) return;
  const set = decodeURIComponent(words.pop() || "");
  const [step, position, index, run = 0] = words.map((text) => text && Number(text));
  if (DATA.rollouts[run] && run !== browser.run) await chooseRun(run);
  const known = DATA.rollouts[run] ? browser.index : { step: [] };
  const i = known.step.findIndex((one, j) => one === step && known.position[j] === position &&
    known.index[j] === index && known.names[known.set[j]] === set);
  if (i >= 0) {
    showSet(set);
    browser.page = Math.max(0, Math.floor(browser.found.indexOf(i) / PAGE_ROWS));
    drawList();
    await openRollout(i);
    browser.list.querySelector(`[data-i="${i}"]`)?.scrollIntoView({ block: "center" });
  } else if ($("#rollout")) {
    $("#rollout").replaceChildren(h("p", { class: "bad" }, `${location.hash} names no rollout of this report.`));
  }
  ($("#rollout") || $("#rollouts")).scrollIntoView();
}

const facts = (pairs) => h("ul", { class: "facts" }, pairs.filter(([, value]) => value !== null &&
  value !== undefined && value !== "")
  .map(([name, value]) => h("li", {}, h("span", {}, name), ...safe(asText(value)))));

/** Buttons that open rollouts which belong together, if there are several. */
function siblings(name, about, found, i, word, value) {
  return found.length > 1 ? h("div", { class: "modes", role: "group", "aria-label": about },
    h("span", { class: "who" }, name),
    found.map((j) => h("button", { type: "button", "aria-pressed": String(j === i), class: j === i ? "chosen" : null,
      "aria-label": word(j), onclick: () => openRollout(j) }, value(j)))) : null;
}

function summary(i) {
  const index = browser.index, group = [], set = index.names[index.set[i]], over = set ? answersOver(i) : [];
  for (let j = 0; j < index.step.length; j++) {
    if (index.set[j] !== index.set[i] || index.position[j] !== index.position[i]) continue;
    if (index.step[j] === index.step[i]) group.push(j);
  }
  return [h("h3", {}, set ? "Evaluation " : "", ...safe(set), set ? " at step " : "Step ",
    `${index.step[i]}, dataset row ${index.row[i]}, ${set ? "answer" : "rollout"} ${index.index[i]} `,
    h("a", { class: "direct", href: linkOf(i), title: "Opens the page with this rollout" }, "link")),
    facts([["reward", number(index.reward[i])], ["accuracy", number(index.accuracy[i])], ["tokens", index.tokens[i]],
      ["oldest token", index.stale[i] === null ? null : `${index.stale[i]} versions old`],
        ["ended by", index.names[index.finish[i]]],
      ["left out of the loss", index.names[index.cause[i]]]]),
    siblings("group", "Rollouts of the same group", group, i,
      (j) => `Rollout ${index.index[j]}, reward ${number(index.reward[j])}`, (j) => number(index.reward[j])),
    siblings("the same row at step", "Answers to the same row", over, i,
      (j) => `Step ${index.step[j]}, accuracy ${number(index.accuracy[j])}`,
      (j) => `${index.step[j]}: ${number(index.accuracy[j])}`)].filter(Boolean);
}

/** A record's fields, prompt and answer; ``answers`` are shown instead of the answer. */
function recordView(record, chunk, answers = null) {
  const parts = [], counts = (of) => Object.entries(of || {}).filter(([, n]) => n).map(([name, n]) =>
    `${name} × ${n}`).join(", "), session = record.session || {};
  parts.push(facts([...Object.entries(record.reward_parts || {}).map(([name, value]) =>
    [`reward: ${name}`, number(value)]),
    ...Object.entries(record.metrics || {}).map(([name, value]) => [name, number(value)]),
      ["expected", record.expected], ["read from the answer", record.extracted],
    ["calls", counts(session.calls)], ["tools", counts(session.tools)],
    ["sent without effect", (session.without_effect || []).join(", ")],
    ["context computed again", record.again ? `${record.again} tokens` : ""],
    ["sampled by", record.generator], ["versions", (record.versions || []).join(" to ")],
      ["learner at version", record.trained_at]]));
  parts.push(h("h3", {}, "Prompt"), record.messages.map((message) =>
    [h("p", { class: "who" }, ...safe(String(message.role))),
    h("div", { class: "say", tabindex: 0 }, ...safe(asText(message.content)))]).flat());
  if (record.turns) parts.push(h("h3", {}, "Turns"), facts(record.turns.map((turn, i) => [`${i + 1}.`,
    `${turn.num_tokens} tokens, reward ${number(turn.reward)}`])));
  const spans = (record.spans || []).map(([end, reward]) => `up to token ${end}: ${number(reward)}`).join("; ");
  if (spans) parts.push(h("p", { class: "who" }, `Rewards of parts: ${spans}`));
  if (answers) parts.push(...answers);
  else if (record.columns) parts.push(...tokenView(record, chunk));
  else if (record.sequences) parts.push(h("h3", {}, "Sequences"),
    record.sequences.map((text) => h("div", { class: "say", tabindex: 0 }, ...safe(text))));
  else if (record.response === null) parts.push(h("p", { class: "empty" }, "This row got no answer."));
  else parts.push(h("h3", {}, "Answer"), h("div", { class: "say", tabindex: 0 }, ...safe(record.response)));
  return parts.flat();
}

/** Undo what the report did to the columns: the four bytes of every number lie in four planes. */
function readColumns(chunk, planes) {
  const count = planes.length / 4, bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < 4; plane++) for (let i = 0; i < count; i++) bytes[4 * i + plane] = planes[plane * count +
    i];
  const all = new Float32Array(bytes.buffer);
  chunk.data = Object.fromEntries(chunk.columns.map((name, c) =>
    [name, all.subarray(c * chunk.size, (c + 1) * chunk.size)]));
}

/** How tokens may be coloured: what it says, and its value of token i. */
const MODES = {
  none: { label: "nothing" },
  version: { label: "version", kind: "names", value: (d, i) => d.version[i] < 0 ? NaN : d.version[i],
    about: "the weights that sampled the token" },
  staleness: { label: "staleness", kind: "size", value: (d, i, learner) => d.version[i] < 0 ?
    NaN : learner - d.version[i], about: "versions between sampling and training" },
  ratio: { label: "ratio", kind: "sides", least: 0.05, value: (d, i) => Math.exp(d.difference[i]) - 1, plus: 1,
    about: "learner's probability divided by that at sampling" },
  difference: { label: "log-prob difference", kind: "sides", least: 0.05, value: (d, i) => d.difference[i],
    about: "learner's log-probability minus that at sampling, nats" },
  advantage: { label: "advantage", kind: "sides", value: (d, i) => d.advantage[i],
    about: "how much the token is encouraged (blue: discouraged)" },
  entropy: { label: "entropy", kind: "size", least: 0.1, value: (d, i) => d.entropy[i],
    about: "of the learner's distribution, nats" },
  surprise: { label: "surprise", kind: "size", least: 0.1, value: (d, i) => -d.behavior[i],
    about: "minus the log-probability at sampling, nats" },
  outcome: { label: "outcome", kind: "outcomes", about: "what the loss did with the token" },
};
const CLIPPED = /^clipped/;

function tokenView(record, chunk) {
  const data = chunk.data, hold = h("div"), legend = h("div", { class: "scale" });
  const paint = () => {
    const mode = MODES[browser.mode], all = [];
    for (const [begin, end, learner] of record.columns) for (let i = begin; i < end; i++) {
      const value = mode.value ? mode.value(data, i, learner) : NaN;
      if (!Number.isNaN(value)) all.push(value);
    }
    const most = all.reduce((a, b) => Math.max(a, Math.abs(b)), mode.least || 0) || 1,
      names = [...new Set(all)].sort((a, b) => a - b);
    const colour = (value) => mode.kind === "names" ? [`var(--c${names.indexOf(value) % 6})`, 38]
      : [value < 0 ? "var(--cold)" : "var(--heat)", 78 * Math.sqrt(Math.abs(value) / most)];
    for (const token of hold.querySelectorAll(".tok")) {
      const i = Number(token.dataset.i), outcome = chunk.outcomes[data.outcome[i]];
      let shade = null;
      if (mode.kind === "outcomes") shade = outcome === "given" || outcome === "trained" ?
        null : [CLIPPED.test(outcome) ? "var(--hold)" : "var(--bad)", 45];
      else if (mode.value) { const value = mode.value(data, i, Number(token.dataset.learner));
        if (!Number.isNaN(value)) shade = colour(value); }
      token.style.background = shade ? `color-mix(in srgb, ${shade[0]} ${shade[1].toFixed(0)}%, transparent)` : "";
    }
    const sample = (shade, text) =>
      { const box = h("i"); box.style.background = `color-mix(in srgb, ${shade[0]} ${shade[1]}%, transparent)`;
      return [box, h("span", {}, text)]; };
    const plus = mode.plus || 0, used = [...new Set(record.columns.flatMap(([a, b]) =>
      [...data.outcome.subarray(a, b)]))].map((code) => chunk.outcomes[code]);
    legend.replaceChildren(...(mode.kind === "names" ? names.map((value) => sample(colour(value), number(value)))
      : mode.kind === "size" ? [sample(colour(0), "0"), sample(colour(most / 2), number(most / 2)),
        sample(colour(most), number(most))]
      : mode.kind === "sides" ? [sample(colour(-most), number(plus - most)), sample(colour(0), number(plus)),
        sample(colour(most), number(plus + most))]
      : mode.kind === "outcomes" ? used.filter((one) => one !== "given").map((one) =>
        sample(one === "trained" ? ["transparent", 0]
        : [CLIPPED.test(one) ? "var(--hold)" : "var(--bad)", 45], one.replaceAll("_", " "))) : []).flat(), mode.about ?
          h("span", {}, "– " + mode.about) : "");
  };
  const modes = h("fieldset", { class: "modes" }, h("legend", {}, "Colour tokens by"),
    Object.entries(MODES).map(([name, mode]) => h("label", {},
    h("input", { type: "radio", name: "mode", value: name, checked: browser.mode === name, onchange: () =>
      { browser.mode = name; paint(); } }), mode.label)));
  record.columns.forEach(([begin, end, learner], number_) => {
    const box = h("div", { class: "say", tabindex: 0, role: "group",
      "aria-label": `Tokens of sequence ${number_ + 1}; arrow keys read them` });
    const heads = new Map(record.parts[number_].map(([role, use, first, last]) => [begin + first,
      `${role ? role + ", " : ""}${use.replaceAll("_", " ")}: ${last - first} tokens`]));
    const fill = (limit) => {
      const until = Math.min(end, begin + limit);
      box.replaceChildren();
      for (let i = begin; i < until; i++) {
        if (heads.has(i)) box.append(h("p", { class: "who" }, ...safe(heads.get(i))));
        box.append(tokenNode(chunk, i, learner));
      }
      if (until < end) box.append(h("button", { type: "button", onclick: () => { fill(Infinity); paint(); } },
        `${end - until} more tokens`));
    };
    fill(MOST_TOKENS);
    readable(box, (token) => tokenText(chunk, Number(token.dataset.i), learner));
    if (record.columns.length > 1) hold.append(h("p", { class: "who" }, `Sequence ${number_ + 1}`));
    hold.append(box);
  });
  paint();
  return [h("h3", {}, "Tokens"), modes, legend, hold, h("p", { class: "who" },
    "Pale: the prompt's or the environment's. Struck through: left out of the loss. " +
    "Point at a token, or use arrow keys, for its values.")];
}

function tokenNode(chunk, i, learner) {
  const [id, text] = chunk.vocabulary[chunk.data.token[i]], outcome = chunk.outcomes[chunk.data.outcome[i]];
  const left = outcome !== "given" && outcome !== "trained" && !CLIPPED.test(outcome);
  return h("span", { class: `tok${outcome === "given" ? " given" : ""}${left ? " left" : ""}`, "data-i": i,
    "data-learner": learner },
    ...(text === "" ? [h("span", { class: "hid" }, `${id}`)] : safe(text)));
}

function tokenText(chunk, i, learner) {
  const d = chunk.data, [id, text] = chunk.vocabulary[d.token[i]], known = (value) => !Number.isNaN(value);
  const lines = [`${JSON.stringify(text)} (id ${id})`, `outcome: ${chunk.outcomes[d.outcome[i]].replaceAll("_", " ")}`];
  if (d.version[i] >= 0) lines.push(`version ${d.version[i]}, ${learner - d.version[i]} old`);
  if (known(d.behavior[i])) lines.push(`log-prob at sampling ${number(d.behavior[i])}`);
  if (known(d.difference[i])) {
    lines.push(`learner's ${number(d.behavior[i] + d.difference[i])}, ratio ${number(Math.exp(d.difference[i]))}`);
  }
  if (known(d.entropy[i])) lines.push(`entropy ${number(d.entropy[i])}`);
  if (known(d.advantage[i])) lines.push(`advantage ${number(d.advantage[i])}`);
  return lines.join("\n").replace(new RegExp(HIDDEN.source, "gu"), "·");
}

/** Let pointer and arrow keys read the tokens in a box. */
function readable(box, text) {
  let at = null;
  const show = (token, x, y) => {
    if (at) at.classList.remove("here");
    at = token;
    if (!token) { tip(""); return; }
    token.classList.add("here");
    const place = token.getBoundingClientRect();
    tip(text(token), x ?? place.left, y ?? place.bottom - 10);
  };
  box.addEventListener("pointermove", (event) => show(event.target.closest(".tok"), event.clientX, event.clientY));
  for (const name of ["pointerleave", "blur"]) box.addEventListener(name, () => show(null));
  box.addEventListener("keydown", (event) => {
    const all = [...box.querySelectorAll(".tok")], step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10,
      Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") show(null);
    if (!step || !all.length) return;
    event.preventDefault();
    const token = all[Math.max(0, Math.min(all.length - 1, (at ? all.indexOf(at) : -1) + step))];
    token.scrollIntoView({ block: "nearest" });
    show(token);
  });
}
