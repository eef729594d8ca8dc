// The page: asks for /status.json again and again, and puts what it says into place. It computes no rates and decides
// nothing: core/looks.py does. Whatever a node says becomes a text node or a number, never markup.
"use strict";

const EVERY_MS = 2000, AT_MOST_MS = 30000, ANSWER_MS = 8000, KEPT_POINTS = 120, SILENT_S = 30;
const SVG = "http://www.w3.org/2000/svg";
const KEY = "headwater-key";
const $ = (id) => document.getElementById(id);

const state = { chosen: 0, history: new Map(), failures: 0, run: null, runVersion: null, isRunLive: true, cut: 0, timer: 0, key: "" };

// --- small things ---------------------------------------------------------------------------------------------------

function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") made.className = value;
    else if (name === "hidden") made.hidden = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((each) => each !== null && each !== undefined));
  return made;
}

function svg(tag, props = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  return made;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A list of elements that follows a list of things: what stays keeps its element, and with it focus and selection.
function follow(parent, things, keyOf, make, fill) {
  const before = new Map([...parent.children].map((each) => [each.dataset.of, each]));
  things.forEach((thing, place) => {
    const of = String(keyOf(thing));
    const found = before.get(of) || make(thing);
    found.dataset.of = of;
    before.delete(of);
    if (parent.children[place] !== found) parent.insertBefore(found, parent.children[place] || null);
    fill(found, thing, place);
  });
  for (const gone of before.values()) gone.remove();
}

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || value >= 100) return number(value);
  return value >= 10 ? number(value, 1) : number(value, 2);
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  while (value >= 999.5 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${place === 0 || value >= 100 ? number(value) : value >= 10 ? number(value, 1) : number(value, 2)} ${units[place]}`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value >= 90) return `${number(value / 60, 1)} min`;
  if (value >= 1) return `${number(value, value < 10 ? 1 : 0)} s`;
  return value >= 1e-3 ? `${number(1e3 * value, value < 0.1 ? 1 : 0)} ms` : `${number(1e6 * value)} µs`;
}

const cores = (value) => `${value.toLocaleString("en", { maximumFractionDigits: 2 })} ${value === 1 ? "core" : "cores"}`;
const percent = (part) => (part === null || part === undefined ? "–" : `${number(100 * part)} %`);
const clock = (atS) => new Date(1000 * atS).toLocaleTimeString([], { hour12: false });

// A number of /metrics: shown in a person's form, and kept as it came beside it.
function metric(node, name, labels, value, text) {
  node.dataset.metric = name;
  node.dataset.labels = labels.join(",");
  node.dataset.value = String(value);
  say(node, text);
}

function meter(node, part) {
  const bar = node.classList.contains("meter") ? node : node.querySelector(".meter");
  bar.firstElementChild.style.width = `${Math.max(0, Math.min(1, part || 0)) * 100}%`;
}

// --- asking ---------------------------------------------------------------------------------------------------------

async function ask(path) {
  const headers = state.key ? { Authorization: `Bearer ${state.key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
  const said = await answer.json().catch(() => ({}));
  if (answer.ok) return said;
  const error = new Error(said.fault || `the node answered ${answer.status}`);
  error.status = answer.status;
  throw error;
}

async function look() {
  clearTimeout(state.timer);
  let wait = EVERY_MS;
  try {
    const said = await ask("/status.json");
    if ((said.run_version || null) !== state.runVersion) {
      state.run = said.run_version ? await ask("/run.json") : null;
      state.runVersion = said.run_version || null;
      showRun(state.run);
    }
    state.failures = 0;
    $("door").hidden = true;
    show(said);
  } catch (error) {
    if (error.status === 401 || error.status === 403 || error.status === 421) { refused(error); return; }
    state.failures += 1;
    wait = Math.min(AT_MOST_MS, EVERY_MS * 2 ** Math.min(state.failures, 5));
    stated("bad", "no answer");
    note(`No answer: ${error.name === "TimeoutError" ? "it takes too long" : error.message}. Numbers are those of before; ` +
      `asked again in ${number(wait / 1000)} s.`);
  }
  if (!document.hidden) state.timer = setTimeout(look, wait);
}

function refused(error) {
  $("all").hidden = true;
  note(error.status === 401 ? "" : error.message);
  stated("bad", "not let in");
  const door = $("door");
  if (error.status !== 401) return;
  const had = state.key !== "";
  keep("");
  say($("door-why"), had ? error.message : "A key is needed to look: a token of this node, or what headwater ui printed.");
  door.hidden = false;
  $("key").focus();
}

// What is told once is not told again: a screen reader reads it out.
function note(text) {
  say($("note"), text);
  $("note").hidden = !text;
}

function keep(key) {
  state.key = key;
  try {
    if (key) sessionStorage.setItem(KEY, key); else sessionStorage.removeItem(KEY);
  } catch { /* no storage: asked for again after a reload */ }
}

function stated(kind, text) {
  const node = $("state");
  node.className = `state ${kind}`;
  say(node, text);
}

// --- nodes ----------------------------------------------------------------------------------------------------------

function show(said) {
  const nodes = said.nodes || [];
  const choices = said.together ? [{ ...said.together, name: `all ${nodes.length} nodes`, fault: "" }, ...nodes] : nodes;
  state.chosen = Math.min(state.chosen, Math.max(0, choices.length - 1));
  for (const each of choices) remember(each);
  $("all").hidden = false;
  showChoices(choices);
  const shown = choices[state.chosen];
  const away = nodes.filter((each) => each.fault).length;
  const draining = nodes.filter((each) => each.draining).length;
  if (!nodes.length) stated("", "no node is watched");
  else if (away) stated("bad", nodes.length === 1 ? "does not answer" : `${away} of ${nodes.length} nodes away`);
  else if (draining) stated("lit", nodes.length === 1 ? "being stopped" : `${draining} being stopped`);
  else stated("good", "live");
  document.body.classList.toggle("no-nodes", !nodes.length);
  for (const id of ["tenants-section", "own", "faults", "rate"]) $(id).closest("section").hidden = !nodes.length;
  $("metrics-link").hidden = said.kind !== "node";
  state.isRunLive = Boolean(state.run && state.run.report && !state.run.report.ended && said.at_s - state.run.report.at_s < SILENT_S);
  if (state.run && state.run.report) sayWhen(state.run.report);
  note(shown && shown.fault ? `${shown.name}: ${shown.fault}` : "");
  if (!shown) { $("prefixes-section").hidden = true; showChain(null); return; }
  const versions = [...new Set(nodes.map((each) => each.version).filter(Boolean))];
  say($("where"), said.kind === "node" ? (shown.roots || []).join(", ") : nodes.length === 1 ? nodes[0].name : "");
  document.title = `${rate(shown.per_s && shown.per_s.rows_sent)} rows/s · Headwater`;
  if (shown.per_s) showNode(shown);
  say($("about"), [versions.length && `Headwater ${versions.join(", ")}`, shown.window_s && `rates over ${number(shown.window_s)} s`,
    "times and rates are measured"].filter(Boolean).join(" · "));
}

function remember(each) {
  const points = state.history.get(each.name) || [];
  points.push(each.per_s ? each.per_s.rows_sent : null);
  state.history.set(each.name, points.slice(-KEPT_POINTS));
}

function showChoices(choices) {
  const box = $("nodes");
  box.hidden = choices.length < 2;
  follow(box, choices, (each) => each.name,
    () => el("button", { type: "button", role: "radio" }, el("span", { class: "title" }), el("span", { class: "of" })),
    (node, each, place) => {
      const chosen = place === state.chosen;
      node.setAttribute("aria-checked", String(chosen));
      node.tabIndex = chosen ? 0 : -1;
      node.classList.toggle("fault", Boolean(each.fault));
      node.dataset.place = place;
      say(node.children[0], each.name.replace(/^grpc(\+tls|\+tcp)?:\/\//, ""));
      say(node.children[1], each.fault ? "does not answer" : `${rate(each.per_s && each.per_s.rows_sent)} rows/s`);
    });
  state.shown = choices;
}

function choose(place) {
  state.chosen = place;
  showChoices(state.shown);
  const shown = state.shown[place];
  note(shown.fault ? `${shown.name}: ${shown.fault}` : "");
  if (shown.per_s) showNode(shown);
}

function showNode(node) {
  say($("rate"), rate(node.per_s.rows_sent));
  say($("limit"), node.limit.said === "measuring" ? "measuring…" : node.limit.on ? `Limited by ${node.limit.said}` : capital(node.limit.said));
  $("limit").className = node.limit.on ? "limit lit" : "limit";
  showHistory(state.history.get(node.name) || []);
  showChain(node);
  showTenants(node);
  showOwn(node);
  showFaults(node);
  showPrefixes(node);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function showHistory(points) {
  const box = $("history");
  const known = points.filter((each) => each !== null);
  const most = Math.max(...known, 1e-9);
  const x = (place) => (600 * (place + KEPT_POINTS - points.length)) / (KEPT_POINTS - 1);
  const y = (value) => 94 - (88 * value) / most;
  const way = points.map((value, place) => (value === null ? null : `${x(place).toFixed(1)},${y(value).toFixed(1)}`)).filter(Boolean);
  if (!box.children.length) {
    box.append(svg("line", { class: "base", x1: 0, x2: 600, y1: 95, y2: 95 }), svg("path", { class: "area" }), svg("path", { class: "line" }));
  }
  const first = way.length ? way[0].split(",")[0] : 0;
  box.children[1].setAttribute("d", way.length > 1 ? `M${first},95 L${way.join(" L")} L600,95 Z` : "");
  box.children[2].setAttribute("d", way.length > 1 ? `M${way.join(" L")}` : "");
  box.setAttribute("aria-label", known.length ? `rows a second, while this page was open: at most ${rate(most)}` : "no rate yet");
}

// --- the chain ------------------------------------------------------------------------------------------------------

const STORAGE = [["read", "Read"], ["decode", "Decode"], ["infer", "Prefix"], ["send", "Send"]];

function showChain(node) {
  const run = state.run && state.run.report;
  const box = $("chain");
  if (!box.children.length) {
    const tier = (kind, stages) => el("section", { class: `tier ${kind}` },
      el("h3", {}, el("span", {}), el("span", { class: "with" })),
      el("ol", { class: "stages" }, ...stages.map(([name, title]) => el("li", { class: "stage", "data-stage": name },
        el("span", { class: "title" }, title), el("span", { class: "busy" }), el("span", { class: "meter" }, el("i"))))));
    box.append(
      tier("storage", STORAGE),
      el("div", { class: "link", "data-stage": "link" }, el("span", { class: "title" }), el("div", { class: "pipe" }), el("span", { class: "busy" })),
      tier("trainer", [["wait", "Wait"], ["step", "Train step"]]));
  }
  const [storage, link, trainer] = box.children;
  const plan = state.run && (state.run.report ? state.run.report.plan : state.run.plan);
  const limited = limiting(node, run);
  say(storage.querySelector("h3 span"), "Storage tier");
  say(storage.querySelector(".with"), node ? cores(node.cores) : "no node is watched");
  const stages = node ? Object.fromEntries(node.stages.map((each) => [each.name, each.busy])) : {};
  for (const stage of storage.querySelectorAll(".stage")) {
    const name = stage.dataset.stage, busy = stages[name];
    if (name === "infer" && plan) stage.title = plan.cut.index ? `the model's part up to ${plan.cut.name}` : "the plan runs no part of the model here";
    say(stage.querySelector(".busy"), busy === undefined || busy === null ? "–" : `${number(busy, 2)} threads`);
    const of = !node ? 1 : name === "decode" || name === "infer" ? node.cores : Math.max(1, node.chunks.working);
    meter(stage, (busy || 0) / (of || 1));
    lit(stage, limited === name);
  }
  const sent = node && node.per_s.row_bytes_sent;
  say(link.querySelector(".title"), sent === null || sent === undefined ? "–" : `${bytes(sent)}/s`);
  say(link.querySelector(".busy"), node && node.per_s.rows_sent ? `${bytes(sent / node.per_s.rows_sent)} a row` : "no rows now");
  link.classList.toggle("flows", Boolean(sent));
  link.classList.toggle("still", !sent);
  lit(link, limited === "send");
  say(trainer.querySelector("h3 span"), run ? "Trainer" : "Trainers");
  say(trainer.querySelector(".with"), node ? `${number(node.chunks.working)} chunks worked on, ${number(node.chunks.waiting)} wait` : "");
  const waits = state.isRunLive ? run.waited_share : null;
  for (const [name, part] of [["wait", waits], ["step", waits === null ? null : 1 - waits]]) {
    const stage = trainer.querySelector(`[data-stage="${name}"]`);
    say(stage.querySelector(".busy"), part !== null ? `${percent(part)} of the time` : state.isRunLive ? "measuring" : !run ? "its trainer knows" : run.ended ? "the run has ended" : "no word of it");
    meter(stage, part || 0);
    lit(stage, name === "step" && limited === "step");
  }
}

function limiting(node, run) {
  if (state.isRunLive && run.waited_share !== null && run.waited_share < 0.2) return "step";
  return node ? node.limit.on : "";
}

function lit(node, is) {
  node.classList.toggle("lit", is);
  if (is) node.setAttribute("aria-description", "limits now"); else node.removeAttribute("aria-description");
}

// --- tenants, machine, faults, prefixes -----------------------------------------------------------------------------

function showTenants(node) {
  $("tenants-none").hidden = node.tenants.length > 0;
  $("tenants").hidden = !node.tenants.length;
  follow($("tenants").tBodies[0], node.tenants, (each) => each.name,
    () => el("tr", {}, el("th", { scope: "row" }), ...Array.from({ length: 6 }, () => el("td"))),
    (row, each) => {
      const cells = row.children, of = [each.name];
      say(cells[0], each.name);
      say(cells[1], rate(each.rows_per_s));
      metric(cells[2], "headwater_rows_sent_total", of, each.rows, `${number(each.rows)} · ${bytes(each.bytes)}`);
      metric(cells[3], "headwater_group_rows", of, each.batch, each.batch ? number(each.batch) : "–");
      say(cells[4], each.memory_bytes ? bytes(each.memory_bytes) : "–");
      say(cells[5], number(each.under_way));
      metric(cells[6], "headwater_errors_total", of, each.errors, number(each.errors));
      cells[6].className = each.errors ? "bad" : "";
    });
}

function showOwn(node) {
  const { memory, cache } = node, own = $("own");
  const asked = cache.hits + cache.misses;
  const facts = [
    ["Memory", "process_resident_memory_bytes", memory.resident_bytes, bytes(memory.resident_bytes),
      memory.limit_bytes ? memory.resident_bytes / memory.limit_bytes : null,
      `of ${bytes(memory.limit_bytes)}` + (memory.budget_bytes ? `; jobs use ${bytes(memory.used_bytes)} of ${bytes(memory.budget_bytes)}` : "") +
      (memory.num_waiting ? `; ${number(memory.num_waiting)} wait for memory` : "")],
    ["CPU", "headwater_cores", node.cores, node.per_s.cpu_s === null ? "–" : `${number(node.per_s.cpu_s, 2)} in use`,
      node.per_s.cpu_s === null ? null : node.per_s.cpu_s / (node.cores || 1), `of ${cores(node.cores)}, ${number(node.threads)} ${node.threads === 1 ? "thread" : "threads"}`],
    ["Cache", "headwater_cache_bytes", cache.bytes, cache.is_on ? bytes(cache.bytes) : "off",
      cache.is_on && cache.limit_bytes ? cache.bytes / cache.limit_bytes : null,
      cache.is_on ? `of ${bytes(cache.limit_bytes)}; ${asked ? `${percent(cache.hits / asked)} of ${number(asked)} rows were there` : "nothing was asked of it yet"}` +
        (cache.damaged ? `; ${number(cache.damaged)} damaged` : "") + (cache.is_full ? "; full" : "") : node.cache_fault || "rows are not kept"],
    ["Rows made", "headwater_rows_made_total", total(node, "headwater_rows_made_total"), number(total(node, "headwater_rows_made_total")), null,
      `${rate(node.per_s.rows_made)} a second; ${rate(node.per_s.rows_kept)} a second from the cache`],
    ["Read from the store", "headwater_read_bytes_total", total(node, "headwater_read_bytes_total"), bytes(total(node, "headwater_read_bytes_total")),
      null, node.per_s.read_bytes === null ? "" : `${bytes(node.per_s.read_bytes)} a second`],
  ];
  follow(own, facts, (each) => each[0],
    () => el("div", {}, el("dt"), el("dd"), el("span", { class: "meter" }, el("i")), el("dd", { class: "more" })),
    (box, [title, name, value, text, part, more]) => {
      say(box.children[0], title);
      metric(box.children[1], name, [], value, text);
      box.children[2].hidden = part === null;
      meter(box.children[2], part);
      say(box.children[3], more);
    });
}

const total = (node, name) => node.numbers.reduce((sum, each) => (each[0] === name ? sum + each[2] : sum), 0);

function showFaults(node) {
  $("faults-none").hidden = node.faults.length > 0;
  follow($("faults"), node.faults, (each) => `${each.at_s} ${each.tenant} ${each.kind} ${each.said}`,
    () => el("li", {}, el("time"), el("span", { class: "kind" }), el("span", { class: "said" })),
    (line, each) => {
      say(line.children[0], clock(each.at_s));
      say(line.children[1], each.times > 1 ? `${each.kind} × ${number(each.times)}` : each.kind);
      say(line.children[2], `${each.tenant}: ${each.said}`);
    });
}

function showPrefixes(node) {
  $("prefixes-section").hidden = !node.prefixes.length;
  follow($("prefixes").tBodies[0], node.prefixes, (each) => `${each.digest} ${each.precision} ${each.outputs}`,
    () => el("tr", {}, ...Array.from({ length: 5 }, () => el("td"))),
    (row, each) => {
      const cells = row.children;
      say(cells[0], each.digest.slice(0, 12));
      cells[0].className = "mono";
      say(cells[1], each.outputs === null ? "everything" : each.outputs.join(", "));
      say(cells[2], each.precision);
      say(cells[3], `${each.engine}, ${each.threads} ${each.threads === 1 ? "thread" : "threads"}`);
      metric(cells[4], "headwater_engine_batch_rows", [each.digest.slice(0, 12), each.precision, each.engine], each.batch, number(each.batch));
      row.title = each.why || "";
    });
}

// --- a run: how it goes, its plan, its timeline -----------------------------------------------------------------------

function showRun(run) {
  const report = run && run.report;
  $("run").hidden = !report;
  if (report) showReport(report);
  const planned = run && run.planned;
  $("plan").hidden = !planned;
  if (planned) showPlan(planned);
  $("timeline").hidden = !(run && run.timeline && run.timeline.strips.length);
  if (!$("timeline").hidden) showTimeline(run.timeline);
}

function showReport(report) {
  const body = $("run-body");
  const facts = [
    ["pictures/s", rate(report.rows_per_s)],
    ["a picture, on its way", bytes(report.bytes_per_row)],
    ["of the time waiting", percent(report.waited_share)],
    ["pictures so far", number(report.num_rows)],
    report.ended ? ["epochs", number(report.epoch)] : [`step of epoch ${number(report.epoch + 1)}`, `${number(report.step)} of ${number(report.num_steps)}`],
    ["left out", number(report.num_skipped)],
  ];
  const list = el("dl", { class: "run" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const had = $("switches") && $("switches").open;
  const switches = [...report.switches].reverse().map((each) => el("li", {}, `After ${number(each.num_rows)} rows: ${each.why.join("; ")}. Went over from ${each.before} to ${each.after}.`));
  body.replaceChildren(list, el("p", { class: "say" }, `${capital(report.describe)}. `, el("span", { id: "when" })));
  sayWhen(report);
  if (!switches.length) return;
  const told = el("details", { class: "switches", id: "switches" },
    el("summary", {}, `Went over to another plan ${switches.length === 1 ? "once" : `${number(switches.length)} times`}`), el("ul", {}, ...switches));
  told.open = had;
  body.append(told);
}

function sayWhen(report) {
  const at = clock(report.at_s);
  say($("when"), report.ended ? `Ended at ${at}.` : state.isRunLive ? `As of ${at}.` : `No word since ${at}: it may have been killed.`);
}

const KINDS = {
  node: ["the node", ["node", "engine", "reads", "ahead", "held_up", "shared_cores"]],
  link: ["a link", ["link_down", "link_up", "port_down", "port_up", "store_link_down", "store_link_up"]],
  trainer: ["the trainer", ["trainer", "loop", "accelerator", "own_engine"]],
  other: ["something else", []],
};
const kindOf = (kind) => Object.keys(KINDS).find((each) => KINDS[each][1].includes(kind.replaceAll(" ", "_"))) || "other";
const most = (loads) => loads.reduce((a, b) => (b.s_per_sample > a.s_per_sample ? b : a), loads[0]);

function showPlan(planned) {
  const cuts = planned.cuts && planned.cuts.length ? planned.cuts : planned.estimates;
  const box = $("cuts");
  say($("plan-why"), planned.explanation || "");
  const fastest = Math.max(...cuts.map((each) => each.estimated.samples_per_s));
  const chosen = cuts.findIndex((each) => each.plan.cut.index === planned.plan.cut.index && each.plan.stages.read === planned.plan.stages.read);
  const used = new Set();
  box.replaceChildren(...cuts.map((each, place) => {
    const kind = kindOf(most(each.estimated.loads).kind);
    used.add(kind);
    const bar = el("i", { class: `k-${kind}` });
    bar.style.height = `${(88 * each.estimated.samples_per_s) / fastest}%`;
    const option = el("div", { role: "option", id: `cut-${place}`, tabindex: "-1", class: place === chosen ? "chosen" : "",
      "aria-label": `${each.plan.cut.name}: ${rate(each.estimated.samples_per_s)} pictures/s, estimated, limited by ${each.estimated.limiting}` }, bar);
    for (const event of ["pointerenter", "focus", "click"]) option.addEventListener(event, () => showCut(cuts, place, planned));
    return option;
  }));
  const [left, right] = $("cuts-axis").children;
  say(left, cuts.length ? `cut at ${cuts[0].plan.cut.name}` : "");
  say(right, cuts.length > 1 ? cuts[cuts.length - 1].plan.cut.name : "");
  $("cuts-legend").replaceChildren(el("span", {}, `estimated pictures/s, at most ${rate(fastest)}; limited by`),
    ...[...used].map((kind) => el("span", {}, el("i", { class: `k-${kind}` }), KINDS[kind][0])));
  showCut(cuts, Math.max(0, chosen), planned);
}

function showCut(cuts, place, planned) {
  state.cut = place;
  const each = cuts[place], about = each.estimated;
  [...$("cuts").children].forEach((option, at) => {
    option.setAttribute("aria-selected", String(at === place));
    option.tabIndex = at === place ? 0 : -1;
  });
  const best = planned.estimates[0].estimated.samples_per_s;
  const against = about.samples_per_s / best;
  const words = Math.abs(against - 1) < 0.005 ? "as fast as the plan that was chosen" : against < 1 ? `${percent(1 - against)} slower than the plan that was chosen` : `${percent(against - 1)} faster than the plan that was chosen`;
  const loads = [...about.loads].sort((a, b) => b.s_per_sample - a.s_per_sample).slice(0, 7), top = loads[0].s_per_sample || 1;
  const list = el("dl", { class: "loads" }, ...loads.flatMap((load) => {
    const bar = el("i", { class: `k-${kindOf(load.kind)}` });
    bar.style.width = `${(100 * load.s_per_sample) / top}%`;
    return [el("dt", {}, load.resource), el("dd", {}, seconds(load.s_per_sample)), el("dd", { class: "bar" }, bar)];
  }));
  $("cut").replaceChildren(
    el("div", {}, el("h3", {}, each.plan.cut.index ? `Cut at ${each.plan.cut.name}` : "Pixels, in front of the model"),
      el("p", {}, `${rate(about.samples_per_s)} pictures/s estimated, ${words}.`),
      el("p", {}, `${bytes(about.down_bytes_per_sample)} a picture over the link.`),
      el("p", { class: "dim" }, about.explanation)),
    list);
}

function overCuts(event) {
  const options = [...$("cuts").children];
  const to = { ArrowRight: state.cut + 1, ArrowDown: state.cut + 1, ArrowLeft: state.cut - 1, ArrowUp: state.cut - 1, Home: 0, End: options.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  options[Math.max(0, Math.min(options.length - 1, to))].focus();
}

function showTimeline(timeline) {
  const { strips, bin_s: binS } = timeline;
  const count = Math.max(...strips.map((each) => each.busy.length));
  const places = [...new Set(strips.map((each) => each.place))];
  const made = [];
  for (const place of places) {
    made.push(el("h3", {}, place.replace(/^grpc(\+tls|\+tcp)?:\/\//, "")));
    for (const strip of strips.filter((each) => each.place === place)) {
      const top = Math.max(...strip.busy, 1);
      const picture = svg("svg", { viewBox: `0 0 ${count} 26`, preserveAspectRatio: "none", "aria-hidden": "true" });
      picture.classList.add(strip.name);
      const way = strip.busy.map((value, at) => `L${at},${(26 - (24 * value) / top).toFixed(2)} L${at + 1},${(26 - (24 * value) / top).toFixed(2)}`);
      picture.append(svg("path", { d: `M0,26 ${way.join(" ")} L${strip.busy.length},26 Z` }), svg("line", { y1: 0, y2: 26, x1: 0, x2: 0 }));
      const point = (event) => {
        const box = picture.getBoundingClientRect();
        moment(timeline, Math.floor((count * (event.clientX - box.left)) / box.width));
      };
      picture.addEventListener("pointermove", point);
      picture.addEventListener("pointerdown", point);
      made.push(el("span", {}, strip.name), picture);
    }
  }
  $("strips").replaceChildren(...made);
  const cursor = $("cursor");
  cursor.max = String(count - 1);
  cursor.oninput = () => moment(timeline, Number(cursor.value));
  moment(timeline, Math.min(Number(cursor.value), count - 1));
  $("strips").setAttribute("aria-label", `${seconds(count * binS)} of the run`);
}

function moment(timeline, at) {
  const count = Math.max(...timeline.strips.map((each) => each.busy.length));
  at = Math.max(0, Math.min(count - 1, at));
  const cursor = $("cursor");
  cursor.value = String(at);
  const said = timeline.strips.filter((each) => each.busy[at] > 0.005)
    .map((each) => `${each.name} ${number(each.busy[at], 2)}${new Set(timeline.strips.map((one) => one.place)).size > 2 ? ` (${each.place.replace(/^grpc(\+tls)?:\/\//, "")})` : ""}`);
  const text = `At ${seconds(at * timeline.bin_s)}, threads busy: ${said.join(", ") || "none"}`;
  say($("cursor-said"), text);
  cursor.setAttribute("aria-valuetext", text);
  for (const line of $("strips").querySelectorAll("line")) { line.setAttribute("x1", at + 0.5); line.setAttribute("x2", at + 0.5); }
}

// --- beginning --------------------------------------------------------------------------------------------------------

function begin() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    keep(given);
    history.replaceState(null, "", location.pathname);  // a key is not left in what others may see of the window
  } else {
    try { state.key = sessionStorage.getItem(KEY) || ""; } catch { state.key = ""; }
  }
  $("door").addEventListener("submit", (event) => {
    event.preventDefault();
    keep($("key").value.trim());
    $("key").value = "";
    look();
  });
  $("nodes").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose(Number(button.dataset.place));
  });
  $("nodes").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const count = state.shown.length;
    choose((state.chosen + step + count) % count);
    $("nodes").children[state.chosen].focus();
  });
  $("cuts").addEventListener("keydown", overCuts);
  document.addEventListener("visibilitychange", () => {
    clearTimeout(state.timer);
    if (!document.hidden) look();
  });
  look();
}

begin();
