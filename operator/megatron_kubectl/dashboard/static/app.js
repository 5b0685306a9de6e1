// The list of resources, and the choice between it and the page of one resource.

import { follow, get, h, setText, showState } from "./dom.js";
import { showResource } from "./resource.js";

const $ = id => document.getElementById(id);
let leaving = new AbortController();

function showList(signal) {
  document.title = "megatron dashboard";
  const rows = new Map();
  const body = h("tbody");
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const empty = h("p", { class: "soft" }, "Reading the resources.");
  const titles = ["Namespace", "Name", "State", "Ready", "Model", "Reason", "Waiting on"];
  const table = h("table", { hidden: true },
    h("thead", {}, h("tr", {}, ...titles.map(title => h("th", { scope: "col" }, title)))), body);
  $("main").replaceChildren(h("section", { "aria-label": "Resources" }, h("h2", {}, "Resources"), error, empty, h("div", { class: "scroll" }, table)));

  const keyOf = resource => `${resource.namespace}/${resource.name}`;
  const remove = key => { rows.get(key)?.row.remove(); rows.delete(key); };

  function put(resource) {
    const key = keyOf(resource);
    let found = rows.get(key);
    if (!found) {
      const cells = Object.fromEntries(["namespace", "ready", "model", "reason", "waitingOn"].map(name => [name, h("td")]));
      for (const name of ["namespace", "ready", "model", "reason"]) cells[name].className = "nowrap";
      const state = h("span");
      const row = h("tr", {}, cells.namespace, h("td", { class: "nowrap" }, h("a", { href: `#/${key}` }, resource.name)),
        h("td", { class: "nowrap" }, state), cells.ready, cells.model, cells.reason, cells.waitingOn);
      found = { row, cells, state };
      rows.set(key, found);
      const after = [...rows.keys()].sort()[[...rows.keys()].sort().indexOf(key) + 1];
      body.insertBefore(row, after ? rows.get(after).row : null);
    }
    for (const [name, cell] of Object.entries(found.cells)) setText(cell, resource[name]);
    found.cells.reason.classList.toggle("bad", resource.degraded);
    showState(found.state, resource.state);
  }

  const namespace = $("namespace").value.trim();
  follow(`api/resources?namespace=${encodeURIComponent(namespace)}`, signal, frame => {
    error.hidden = frame.kind !== "error";
    if (frame.kind === "error") { setText(error, frame.error); return false; }
    if (frame.kind === "set") {
      const present = new Set(frame.resources.map(keyOf));
      for (const key of [...rows.keys()]) if (!present.has(key)) remove(key);
    }
    for (const resource of frame.resources) {
      if (frame.kind === "delete") remove(keyOf(resource));
      else put(resource);
    }
    table.hidden = rows.size === 0;
    empty.hidden = rows.size > 0;
    setText(empty, `There is no MegatronInference in ${namespace ? `namespace ${namespace}` : "any namespace"}.`);
    return true;
  });
}

function route() {
  leaving.abort();
  leaving = new AbortController();
  const [namespace, name] = location.hash.replace(/^#\/?/, "").split("/");
  $("scope").hidden = Boolean(name);
  if (name) showResource($("main"), decodeURIComponent(namespace), decodeURIComponent(name), leaving.signal);
  else showList(leaving.signal);
}

try {
  const session = await (await get("api/session")).json();
  setText($("context"), session.context);
  $("namespace").value = session.namespace;
  $("namespace").addEventListener("change", route);
  addEventListener("hashchange", () => { route(); $("main").focus({ preventScroll: true }); scrollTo(0, 0); });
  route();
} catch (error) {
  setText($("connection"), error.message);
  $("connection").classList.add("lost");
}
