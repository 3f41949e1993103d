"use strict";
// All texts come from servers and clients, so they are set as text, never as HTML.
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const REASONS = /*REASONS*/ {};
const SILENT = "the router does not answer";
const SILENCE_MS = 15000; // events come every three seconds at least

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "path", "text", "circle", "title", "g"].includes(name);
  const element = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") Object.entries(value).forEach(([event, handler]) => element.addEventListener(event, handler));
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
// Change what differs and keep the rest: what is focused or selected stays so. Children are told apart by `data-key`.
function renew(parent, made) {
  const keys = new Set(made.map((one) => one.dataset.key)), focused = document.activeElement;
  for (const old of [...parent.children]) if (!keys.has(old.dataset.key)) old.remove();
  const kept = new Map([...parent.children].map((old) => [old.dataset.key, old]));
  let next = parent.firstElementChild;
  for (const one of made) {
    const old = kept.get(one.dataset.key);
    if (old && old.childNodes.length === one.childNodes.length)
      [...one.childNodes].forEach((child, i) => { if (!child.isEqualNode(old.childNodes[i])) old.childNodes[i].replaceWith(child); });
    else if (old) old.replaceChildren(...one.childNodes);
    if ((old || one) === next) next = next.nextElementSibling;
    else parent.insertBefore(old || one, next);
  }
  if (parent.contains(focused) && document.activeElement !== focused) focused.focus({ preventScroll: true });
}
function show(id, ...children) {
  const old = byId(id), made = old.cloneNode(false);
  made.append(...children);
  if (!made.isEqualNode(old)) old.replaceChildren(...made.childNodes);
}
function say(id, text, kind) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
  if (kind !== undefined) byId(id).className = kind;
}
const number = (value, digits = 1) => (value === null || value === undefined ? "-" : value.toFixed(digits));
const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)} %`);

function bars(target, rows, empty) {
  const most = Math.max(1, ...rows.map(([, count]) => count));
  show(target,
    ...(rows.length ? [] : [make("span", { class: "dim" }, empty)]),
    ...rows.flatMap(([name, count, title, kind]) => [
      make("span", { title: title || null }, name),
      make("span", { class: "bar" }, make("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
        make("rect", { width: (100 * count) / most, height: 10, class: kind || "pdf" }))),
      make("span", { class: "num" }, String(count)),
    ])
  );
}

function tile(name, value, kind) {
  return make("div", { class: "tile" }, make("span", { class: "dim" }, name), make("b", { class: kind || "" }, value));
}

// Of the last minute.
function newest(series, field) {
  const found = series.filter((point) => point.age_s <= 60 && point[field] !== null);
  return found.length ? found[found.length - 1][field] : null;
}

function chart(target, name, field, latency) {
  const width = 600, height = 170, left = 46, bottom = 20, span = 600;
  const lists = [["handed_off", "handed off (P/D)", "pd"], ["local", "one engine", "loc"]];
  const all = lists.flatMap(([key]) => latency[key].map((point) => point[field]).filter((value) => value !== null));
  const most = Math.max(...all, 1e-3) * 1.1;
  const x = (age) => left + (width - left - 8) * (1 - age / span);
  const y = (value) => (height - bottom) * (1 - value / most) + 4;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}: median by ten seconds, last ten minutes, in ms` });
  for (const share of [0, 0.5, 1]) {
    const value = (most / 1.1) * share;
    svg.append(make("line", { x1: left, x2: width, y1: y(value), y2: y(value), class: "axis" }),
      make("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end", class: "dimt" }, value >= 100 ? value.toFixed(0) : value.toFixed(1)));
  }
  svg.append(make("text", { x: left, y: height - 2, class: "dimt" }, "10 min ago"),
    make("text", { x: width - 4, y: height - 2, "text-anchor": "end", class: "dimt" }, "now"));
  for (const [key, , kind] of lists) {
    const points = latency[key].filter((point) => point[field] !== null);
    const path = points.map((point, i) => `${i ? "L" : "M"}${x(point.age_s).toFixed(1)} ${y(point[field]).toFixed(1)}`).join("");
    if (path) svg.append(make("path", { d: path, class: `${kind}l` }));
    for (const point of points) svg.append(make("circle", { cx: x(point.age_s), cy: y(point[field]), r: 2.5, class: `${kind}f` },
      make("title", {}, `${number(point[field])} ms, ${point.num_requests} requests`)));
  }
  const legend = make("div", { class: "legend" }, ...lists.map(([key, name]) =>
    make("span", {}, `${key === "local" ? "- -" : "—"} ${name}: ${number(newest(latency[key], field))} ms`)));
  show(target, svg, legend);
}

function health(engine) {
  if (engine.draining) return ["draining", "warn"];
  return engine.healthy ? ["healthy", "ok"] : ["not usable", "bad"];
}

function engineRow(engine) {
  const load = engine.load, [text, kind] = health(engine), can = byId("token").value.length > 0;
  const hits = load && load.num_prefix_queries ? load.num_prefix_hits / load.num_prefix_queries : null;
  const change = (what) => make("button", { type: "button", disabled: !can, "data-url": engine.url, "data-what": what,
    on: { click: () => administer(what, { url: engine.url }) } }, what === "drain" ? "Drain" : "Remove");
  const cell = (name, value, kind) => make("td", { "data-name": name, class: kind || null }, value);
  return make("tr", { "data-key": engine.url },
    make("td", {}, engine.info ? engine.info.engine_id : engine.url, make("small", {}, engine.url)),
    cell("Role", engine.role),
    make("td", { "data-name": "Health" }, make("span", { class: `pill ${kind}` }, text),
      engine.problem ? make("small", {}, engine.problem) : null),
    cell("Legs", String(engine.num_inflight), "num"),
    cell("Running", load ? String(load.num_running) : "-", "num"),
    cell("Waiting", load ? String(load.num_waiting) : "-", "num"),
    make("td", { "data-name": "KV in use" }, load ? make("meter", { min: 0, max: 1, value: load.kv_usage, "aria-label": "KV in use" }) : "-",
      make("small", {}, load ? percent(load.kv_usage) : "")),
    cell("Prefix hits", percent(hits), "num"),
    cell("Handoffs", load ? String(load.num_handoffs) : "-", "num"),
    make("td", { class: "adm" }, change("drain"), " ", change("remove")));
}

function acceptance(groups) {
  if (!groups.length) return make("p", { class: "dim" }, "No request with drafts has ended yet.");
  const part = (told) => make("td", {}, ...(told.acceptance_per_pos.length
    ? told.acceptance_per_pos.map((share) => make("span", { class: "pos" }, percent(share))) : ["-"]));
  return make("table", {}, make("thead", {}, make("tr", {}, ...["Route", "Engines", "Requests", "First verification, by position", "Later verifications, by position"]
    .map((name) => make("th", {}, name)))), make("tbody", {}, ...groups.map((group) => make("tr", {},
    make("td", {}, group.route.replaceAll("_", " ")),
    make("td", {}, group.prefill ? `${group.prefill} to ${group.decode}` : group.decode),
    make("td", {}, String(group.num_requests)), part(group.first_verification), part(group.later_verifications)))));
}

function requestRow(request) {
  const cell = (name, value, kind) => make("td", { "data-name": name, class: kind || null }, value);
  return make("tr", { "data-key": request.id },
    make("td", {}, make("button", { type: "button", class: "link", on: { click: () => lookUp(request.id) } }, request.id)),
    cell("Route", request.route.replaceAll("_", " ") || "waiting"), cell("Engines", request.engines.join(" to ")),
    cell("Prompt", String(request.prompt_tokens), "num"), cell("Output", String(request.output_tokens), "num"),
    cell("TTFT", number(request.ttft_ms), "num"), cell("TPOT", number(request.tpot_ms, 2), "num"),
    cell("End", request.finish || request.stage));
}

function reasons(last) {
  return Object.entries(last).filter(([why, count]) => count && why !== "handed_off")
    .map(([why, count]) => `${count} because ${REASONS[why] || why}`).join("; ");
}

let version = null, announced = "";
function render(state) {
  if (version !== null && version !== state.version) location.reload();
  version = state.version;
  say("state", state.ready ? "ready" : "no engine can take requests", `pill ${state.ready ? "ok" : "bad"}`);
  say("model", state.model || "");
  say("version", `Baton ${state.version}`);
  show("alarms", ...state.alarms.map((line) => make("div", { class: "alarm" }, line)));
  // Read aloud once, not for each new number in it.
  const kinds = state.alarms.map((line) => line.replace(/[\d.]+/g, "")).join("; ");
  if (kinds !== announced) say("announced", state.alarms.join("; ") || "no alarms");
  announced = kinds;
  const stages = state.stages, last = state.decisions.last;
  const total = Object.values(last).reduce((sum, count) => sum + count, 0);
  show("tiles",
    tile("Requests", String(state.num_requests)),
    tile("Running", String(stages.prefill + stages.handoff + stages.decode)),
    tile("Waiting", String(stages.waiting), stages.waiting > 50 ? "bad" : stages.waiting > 10 ? "warn" : ""),
    tile(`Handed off of the last ${total}`, String(last.handed_off || 0)),
    tile("TTFT P/D, ms", number(newest(state.latency.handed_off, "ttft_ms"))),
    tile("TPOT P/D, ms", number(newest(state.latency.handed_off, "tpot_ms"), 2)),
    tile("Wait for the second token P/D, ms", number(newest(state.latency.handed_off, "handoff_ms"))),
    tile("Handoffs failed", String(state.handoffs.failed), state.handoffs.failed ? "warn" : ""));
  renew(byId("engines").tBodies[0], state.engines.map(engineRow));
  say("admin-note", state.admin
    ? "The token stays in this page. Without it, the page only reads."
    : "Off: start the router with --admin-token-file.");
  bars("stages", [["waiting", stages.waiting], ["prefill", stages.prefill], ["handoff", stages.handoff], ["decode", stages.decode]], "");
  const why = reasons(last);
  say("because", total
    ? `${last.handed_off || 0} of the last ${total} were handed off${why ? `; ${why}` : ""}.` : "No request yet.");
  bars("routes", Object.entries(last).filter(([, count]) => count).map(([name, count]) =>
    [name.replaceAll("_", " "), count, REASONS[name], name === "handed_off" ? "pdf" : "locf"]), "");
  chart("ttft", "time to first token", "ttft_ms", state.latency);
  chart("tpot", "time per output token", "tpot_ms", state.latency);
  show("acceptance", acceptance(state.acceptance.groups));
  bars("recoveries", [...Object.entries(state.recoveries).map(([rung, count]) => [`recovery: ${rung}`, count]),
    ...Object.entries(state.handoffs.failures).map(([reason, count]) => [`failed: ${reason}`, count, "", "locf"])], "None.");
  renew(byId("errors"), state.errors.length ? state.errors.map((request) => make("li", { "data-key": request.id },
    make("button", { type: "button", class: "link", on: { click: () => lookUp(request.id) } }, request.id), ` ${request.error}`))
    : [make("li", { class: "dim", "data-key": "none" }, "None.")]);
  renew(byId("requests").tBodies[0], state.requests.map(requestRow));
}

function timeline(choice) {
  const width = 600, left = 130, row = 24, span = Math.max(choice.duration_ms, 0.1);
  const height = row * choice.events.length + 24;
  const x = (at) => left + (width - left - 10) * (at / span);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `timeline of ${choice.id}` });
  choice.events.forEach((event, i) => {
    const until = i + 1 < choice.events.length ? choice.events[i + 1].at_ms : span;
    svg.append(make("text", { x: 0, y: row * i + 16 }, event.name.slice(0, 22)),
      make("rect", { x: x(event.at_ms), y: row * i + 5, width: Math.max(2, x(until) - x(event.at_ms)), height: 12,
        class: event.name.startsWith("recovery") ? "locf" : "pdf" }, make("title", {}, `${event.at_ms} ms: ${event.text}`)));
  });
  svg.append(make("text", { x: left, y: height - 4, class: "dimt" }, "0 ms"),
    make("text", { x: width - 6, y: height - 4, "text-anchor": "end", class: "dimt" }, `${number(span)} ms`));
  const list = make("ol", { class: "list" }, ...choice.events.map((event) =>
    make("li", {}, `${number(event.at_ms)} ms: ${event.name}${event.text ? ` — ${event.text}` : ""}`)));
  const drafts = choice.drafted.reduce((sum, count) => sum + count, 0);
  const facts = `${choice.prompt_tokens} prompt tokens, ${choice.output_tokens} output tokens, TTFT ${number(choice.ttft_ms)} ms, TPOT ${number(choice.tpot_ms, 2)} ms` +
    (drafts ? `, ${choice.accepted.reduce((sum, count) => sum + count, 0)} of ${drafts} drafts accepted in ${choice.accepted.length} verifications` : "");
  return make("div", {}, make("h3", {}, choice.id), make("p", { class: "dim" }, facts), svg, list);
}

// Returns the answer's content, and null or what went wrong.
async function ask(path, options) {
  try {
    const answer = await fetch(path, options), told = await answer.json().catch(() => ({}));
    return [told, answer.ok ? null : told.error ? told.error.message : `HTTP ${answer.status}`];
  } catch {
    return [{}, SILENT];
  }
}

async function lookUp(id) {
  byId("lookup-id").value = id;
  const [told, wrong] = await ask(`dashboard/requests/${encodeURIComponent(id)}`);
  byId("timeline").replaceChildren(...(wrong === null ? told.choices.map(timeline) : [make("p", { class: "bad" }, wrong)]));
}

async function administer(what, body) {
  say("admin-result", `${what} ...`, "");
  const [, wrong] = await ask(`instances/${what}`, { method: "POST", body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${byId("token").value}` } });
  say("admin-result", `${what}: ${wrong === null ? `${body.url} done` : wrong}`, wrong === null ? "ok" : "bad");
}

byId("lookup").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("lookup-id").value.trim();
  if (id) lookUp(id);
});
byId("admin-form").addEventListener("submit", (event) => {
  event.preventDefault();
  administer("add", { url: byId("add-url").value, role: byId("add-role").value });
});
byId("token").addEventListener("input", () => {
  const given = byId("token").value.length > 0;
  byId("add").disabled = !given;
  document.querySelectorAll("#engines button").forEach((button) => { button.disabled = !given; });
});
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
let silence;
function lost() {
  say("state", SILENT, "pill bad");
  document.body.classList.add("stale");
}
// A router that hangs, or whose host is gone, ends no connection; and a browser does not try again after a refusal.
function listen() {
  const events = new EventSource("dashboard/events");
  const again = () => { clearTimeout(silence); silence = setTimeout(() => { events.close(); lost(); listen(); }, SILENCE_MS); };
  again();
  events.addEventListener("message", (event) => {
    again();
    document.body.classList.remove("stale");
    render(JSON.parse(event.data));
  });
  events.addEventListener("error", lost);
}
listen();
