// The page of one resource: state, actions and their progress, engines, charts, history, logs, preview of a change.

import { Chart, duration, tokens, within } from "./charts.js";
import { follow, request, showConnection, verb } from "./connection.js";
import { h, setText, showState, visible } from "./dom.js";

const MAX_LOG_CHARACTERS = 400_000;
const MAX_ENTRIES = 100;
const percent = share => `${(100 * share).toFixed(0)} %`;
const whole = value => value.toFixed(0);
const shown = (value, format) => value === null || value === undefined ? "–" : format(value);
const time = at => at ? new Date(at).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }) : "";

const ACTIONS = [
  { verb: "Run", state: "Running", text: "The engines serve requests, from any state." },
  { verb: "Pause", state: "Paused", text: "Generation pauses and new requests wait. Memory stays allocated." },
  { verb: "Suspend", state: "Suspended", text: "Generation pauses and the engines release their memory." },
  { verb: "Stop", state: "Stopped", text: "Open requests are finished, then the engines are removed." },
  { verb: "Scale", text: "Engines are added, or drained and removed." },
  { verb: "Restart", text: "Engines that have used up their restart budget start again. Engines that serve stay as they are." },
];

/** Ask for a confirmation. Returns true, or the number of engines, or null. */
function confirmed(title, text, verb, number) {
  const $ = id => document.getElementById(`confirm${id}`);
  const dialog = $("");
  setText($("-title"), title);
  setText($("-text"), text);
  setText($("-ok"), verb);
  $("-field").hidden = number === undefined;
  $("-number").value = number ?? 0;
  return new Promise(resolve => {
    let answer = null;
    const accept = () => {
      if (number !== undefined && !$("-number").reportValidity()) return;
      answer = number === undefined ? true : $("-number").valueAsNumber;
      if (Number.isNaN(answer)) { answer = null; return; }
      dialog.close();
    };
    const events = new AbortController(), { signal } = events;
    $("-ok").addEventListener("click", accept, { signal });
    $("-cancel").addEventListener("click", () => dialog.close(), { signal });
    $("-number").addEventListener("keydown", event => { if (event.key === "Enter") { event.preventDefault(); accept(); } }, { signal });
    dialog.addEventListener("close", () => { events.abort(); resolve(answer); }, { signal });
    dialog.showModal();
    $(number === undefined ? "-ok" : "-number").focus();
  });
}

/** Return { done, text, share } of a requested action, from the current resource. */
function progressOf(asked, resource) {
  const status = resource.status, lifecycle = status.lifecycle ?? {};
  const waits = status.plan?.waitingOn ? `; waiting for ${status.plan.waitingOn}` : "";
  const [ready, all] = (status.ready ?? "0/0").split("/");
  if (asked.verb === "Restart") {
    if (status.attempt === asked.attempt) return { done: false, text: "Restart: requested" };
    if (ready === all) return { done: true, text: `Restart: done, ${status.ready} engines ready` };
    return { done: false, text: `Restart: budgets are reset, ${status.ready} engines ready${waits}` };
  }
  if ((status.observedGeneration ?? 0) < asked.generation) return { done: false, text: `${asked.verb}: requested` };
  if (asked.verb === "Scale") {
    if (resource.replicas !== asked.replicas) return { done: true, text: "Scale: replaced by another request" };
    const rests = asked.replicas === 0 ? resource.state === "Suspended" : resource.desired !== "Running" && resource.settled;
    if (rests || (ready === all && status.readyReplicas === asked.replicas)) return { done: true, text: `Scale: done, ${status.ready} engines ready` };
    return { done: false, text: `Scale: ${status.ready ?? ""} engines ready${waits}` };
  }
  if (resource.desired !== asked.state) return { done: true, text: `${asked.verb}: replaced by another request` };
  if (resource.settled) return { done: true, text: `${asked.verb}: confirmed by every rank` };
  const total = lifecycle.totalRanks;
  const ranks = total ? `${lifecycle.confirmedRanks ?? 0} of ${total} ranks confirmed` : resource.state;
  const failed = lifecycle.phase === "Failed" && lifecycle.message ? `; failed: ${lifecycle.message}` : "";
  return { done: false, share: total ? (lifecycle.confirmedRanks ?? 0) / total : undefined, text: `${asked.verb}: ${ranks}${waits}${failed}` };
}

class Actions {
  constructor(where, title) {
    this.where = where;
    this.title = title;
    this.resource = null;
    this.asked = null;
    this.bar = h("progress", { hidden: true, "aria-label": "Ranks that have confirmed" });
    this.text = h("span", { role: "status" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.buttons = ACTIONS.map(action => {
      const button = h("button", { type: "button", disabled: true }, action.verb);
      button.addEventListener("click", () => this.request(action));
      return button;
    });
    this.element = h("div", {}, h("div", { class: "buttons", role: "toolbar", "aria-label": "Actions" }, ...this.buttons), h("p", { class: "soft" }, this.bar, " ", this.text), this.error);
  }

  async request(action) {
    const resource = this.resource;
    const answer = await confirmed(`${action.verb} ${this.title}?`, action.text, action.verb, action.verb === "Scale" ? resource.replicas : undefined);
    if (answer === null) return;
    this.error.hidden = true;
    const bodies = { Scale: { do: "scale", replicas: answer }, Restart: { do: "restart" } };
    try {
      const { attempt } = this.resource.status;
      const { generation } = await verb({ ...this.where, ...(bodies[action.verb] ?? { do: "set-state", state: action.state }) });
      this.asked = { ...action, generation, replicas: answer, attempt };
      this.update(this.resource);
    } catch (error) {
      this.error.hidden = false;
      setText(this.error, `${action.verb}: ${error.message}`);
    }
  }

  update(resource) {
    this.resource = resource;
    for (const button of this.buttons) button.disabled = resource === null;
    if (!this.asked || resource === null) return;
    const { done, text, share } = progressOf(this.asked, resource);
    setText(this.text, text);
    this.text.className = done ? "good" : "busy";
    this.bar.hidden = done;
    if (share === undefined) this.bar.removeAttribute("value");
    else this.bar.value = share;
    if (done) this.asked = null;
  }
}

/** Make a table. numbers, unbroken: the columns with numbers, and those whose text is not wrapped. */
function rowsTable(label, titles, numbers, unbroken = new Set()) {
  const body = h("tbody");
  const head = titles.map((title, index) => h("th", { scope: "col", class: numbers.has(index) ? "number" : "nowrap" }, title));
  const table = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, ...head)), body);
  const fill = rows => body.replaceChildren(...rows.map(cells => h("tr", {}, ...cells.map((cell, index) =>
    h("td", { class: numbers.has(index) ? "number" : unbroken.has(index) ? "nowrap" : "" }, cell)))));
  return { element: h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, table), fill };
}

function stateOf(state) {
  const element = h("span");
  showState(element, state);
  return element;
}

function engineRows(resource, sample) {
  return (resource?.status.engines ?? []).map(engine => {
    const now = sample?.engines[engine.name] ?? {};
    const why = engine.diagnosis ? h("div", { class: "error" }, engine.diagnosis) : null;
    return [h("div", {}, h("span", { class: "name" }, engine.name), why), stateOf(engine.state), shown(now.waiting, whole), shown(now.queued_tokens, whole), shown(now.running, whole), shown(now.kv_usage, percent),
      shown(now.prefix_hit_rate, percent), shown(now.tokens_per_second, tokens), String(now.epoch ?? engine.epoch ?? "–"), String(engine.ranks ?? "–")];
  });
}

function timeline(resource, events) {
  const status = resource?.status ?? {};
  const conditions = (status.conditions ?? []).map(each => ({ at: each.lastTransitionTime, kind: "Condition", text: `${each.type} ${each.status}: ${each.reason}: ${each.message}` }));
  const transitions = (status.history ?? []).map(each => ({ at: each.at, kind: "Transition", text: `${each.from} → ${each.to} in ${each.seconds} s, by ${each.by}` }));
  const notes = events.map(each => ({ at: each.at, kind: each.type === "Warning" ? "Warning" : "Event", text: `${each.reason}: ${each.note}${each.count > 1 ? ` (${each.count} times)` : ""}` }));
  const order = [...conditions, ...transitions, ...notes].sort((one, other) => Date.parse(other.at) - Date.parse(one.at));
  return order.slice(0, MAX_ENTRIES).map(each => [time(each.at), each.kind, each.text]);
}

function logs(where, signal) {
  const select = h("select", { "aria-label": "Container" });
  const button = h("button", { type: "button", disabled: true }, "Follow");
  const output = h("pre", { class: "log", tabindex: "0", role: "group", "aria-label": "Log" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  let reading = null;
  const append = text => {
    const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
    const all = output.textContent + visible(text);
    output.textContent = all.length > MAX_LOG_CHARACTERS ? all.slice(all.indexOf("\n", all.length - MAX_LOG_CHARACTERS) + 1) : all;
    if (atEnd) output.scrollTop = output.scrollHeight;
  };
  const stop = () => { reading?.abort(); reading = null; setText(button, "Follow"); };
  button.addEventListener("click", async () => {
    if (reading) { stop(); return; }
    const mine = reading = new AbortController();
    const [pod, container] = select.value.split("/");
    setText(button, "Stop following");
    error.hidden = true;
    output.textContent = "";
    try {
      await request({ do: "log", ...where, pod, container }, { signal: mine.signal, onValue: append });
    } catch (failure) {
      if (!mine.signal.aborted) { error.hidden = false; setText(error, failure.message); }
    }
    if (reading === mine) stop();
  });
  select.addEventListener("change", stop);
  signal.addEventListener("abort", stop);
  const update = pods => {
    const names = pods.flatMap(pod => pod.containers.map(container => `${pod.name}/${container}`));
    const present = [...select.options].map(option => option.value);
    if (names.join() !== present.join()) {
      const chosen = select.value;
      select.replaceChildren(...names.map(name => h("option", { value: name }, name)));
      if (names.includes(chosen)) select.value = chosen;
    }
    button.disabled = !names.length;
  };
  return { element: h("section", { "aria-label": "Logs" }, h("h3", {}, "Logs"), h("div", { class: "buttons" }, select, button), error, output), update };
}

function preview(where) {
  const editor = h("textarea", { "aria-label": "Spec in YAML", spellcheck: false });
  const button = h("button", { type: "button", class: "primary" }, "Preview");
  const reset = h("button", { type: "button" }, "Current spec");
  const result = h("div", { role: "status" });
  const error = h("pre", { class: "error", role: "alert", hidden: true });
  let current = "";
  button.addEventListener("click", async () => {
    error.hidden = true;
    result.replaceChildren();
    try {
      const { changes, steps, restarts } = await request({ do: "plan", ...where, spec: editor.value });
      if (!changes.length && !steps.length) { result.append(h("p", {}, "Nothing changes.")); return; }
      const table = rowsTable("Changes", ["Change", "Object", "Field", "Pods"], new Set());
      table.fill(changes.map(each => [each.verb, each.child, each.field, each.restarts ? "restarted" : ""]));
      result.append(table.element, h("ol", {}, ...steps.map(step => h("li", {}, step))), h("p", {}, `Engines that restart: ${restarts.join(", ") || "none"}`));
    } catch (failure) { error.hidden = false; setText(error, failure.message); }
  });
  reset.addEventListener("click", () => { editor.value = current; result.replaceChildren(); error.hidden = true; });
  const update = text => {
    if (editor.value === current) editor.value = text;
    current = text;
  };
  const details = h("details", {}, h("summary", {}, "Preview a change of the spec"),
    h("p", { class: "soft" }, "The preview changes nothing. Apply a change with kubectl."), editor, h("div", { class: "buttons" }, reset, button), error, result);
  return { element: h("section", { "aria-label": "Preview" }, details), update };
}

export function showResource(main, namespace, name, back, signal) {
  const title = `${namespace}/${name}`, where = { namespace, name };
  document.title = visible(`${title} – megatron dashboard`);
  let resource = null, events = [], samples = [];
  const state = h("span", { class: "state soft" }, "…"), facts = h("span", { class: "soft" });
  const missing = h("p", { class: "soft", hidden: true }, "There is no such resource.");
  const actions = new Actions(where, title), log = logs(where, signal), plan = preview(where);
  const engines = rowsTable("Engines", ["Engine", "State", "Queue", "Queued tokens", "Running", "KV use", "Prefix hits", "Tokens/s", "Epoch", "Ranks"], new Set([2, 3, 4, 5, 6, 7, 8, 9]));
  const history = rowsTable("Conditions, Events and history", ["Time", "Kind", "Message"], new Set(), new Set([0, 1]));
  const explain = h("pre", { role: "group", "aria-label": "Explanation", tabindex: "0" });
  const errors = Object.fromEntries(["resource", "events", "pods", "explain", "metrics"].map(part => [part, h("p", { class: "error", hidden: true })]));
  const charts = [
    new Chart("Throughput, tokens/s", [{ label: "", key: "tokens_per_second" }], tokens, signal),
    new Chart("Time to first token", [{ label: "p50", key: "ttft_p50" }, { label: "p95", key: "ttft_p95" }], duration, signal),
    new Chart("Inter-token latency", [{ label: "p50", key: "itl_p50" }, { label: "p95", key: "itl_p95" }], duration, signal),
  ];
  const card = (label, ...children) => h("section", { "aria-label": label }, h("h3", {}, label), ...children);
  main.replaceChildren(
    h("section", { "aria-label": "Resource" }, h("div", { class: "title" }, h("a", { href: back }, "← Resources"), h("h2", {}, title), state, facts), errors.resource, missing, actions.element),
    h("div", { class: "columns" }, card("Engines", engines.element), card("Explanation", errors.explain, explain)),
    card("Last 15 minutes", errors.metrics, h("div", { class: "charts" }, ...charts.map(chart => chart.element))),
    card("History", errors.events, history.element), h("div", {}, errors.pods, log.element), plan.element);

  const showEngines = () => engines.fill(engineRows(resource, samples.at(-1)));
  function showFacts() {
    if (!resource) return;
    showState(state, resource.state);
    const queued = samples.at(-1)?.queued;
    const parts = [`desired ${resource.desired}`, `${resource.ready || "0/0"} engines ready`, resource.model && `model ${resource.model}`, queued !== null && queued !== undefined && `${queued} queued`];
    setText(facts, parts.filter(Boolean).join(" · "));
  }
  const show = {
    resource(value) {
      resource = value;
      missing.hidden = value !== null;
      actions.update(value);
      if (value) plan.update(value.specText);
      showFacts();
      showEngines();
      history.fill(timeline(resource, events));
    },
    events(value) { events = value; history.fill(timeline(resource, events)); },
    pods(value) { log.update(value); },
    explain(value) { setText(explain, value.join("\n")); },
    samples(value) {
      samples = within([...samples.filter(each => each.at < value[0].at), ...value]);
      for (const chart of charts) chart.update(samples);
      showFacts();
      showEngines();
    },
    errors(value) {
      const live = !("resource" in value);
      showConnection(live ? "live" : "not live; retrying", !live);
      for (const [part, element] of Object.entries(errors)) {
        element.hidden = !(part in value);
        setText(element, value[part] ?? "");
      }
    },
  };
  follow({ do: "observe", ...where }, signal, frame => show[frame.part](frame.value), text => showConnection(text, true));
}
