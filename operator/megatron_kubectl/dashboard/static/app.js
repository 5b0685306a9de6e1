// The list of resources, and the choice between it and the page of one resource.

import { connect, follow, session, showConnection, takeToken } from "./connection.js";
import { h, setText, showState, visible } from "./dom.js";
import { showResource } from "./resource.js";

const $ = id => document.getElementById(id);
let leaving = new AbortController();

/** The address of the list with the namespace that was shown last in this tab, or with the default one. */
function listAddress() {
  const kept = sessionStorage.getItem("namespace");
  return kept === null ? "#/" : `#/?namespace=${encodeURIComponent(kept)}`;
}

function showList(namespace, signal) {
  document.title = "megatron dashboard";
  const rows = new Map();
  const body = h("tbody");
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const empty = h("p", { class: "soft" }, "Reading the resources.");
  const titles = ["Namespace", "Name", "State", "Ready", "Model", "Reason", "Waiting on"];
  const table = h("table", { hidden: true },
    h("thead", {}, h("tr", {}, ...titles.map(title => h("th", { scope: "col" }, title)))), body);
  $("main").replaceChildren(h("section", { "aria-label": "Resources" }, h("h2", {}, "Resources"), error, empty, h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Resources" }, table)));

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

  const fail = text => {
    error.hidden = false;
    setText(error, text);
    showConnection("not live; retrying", true);
  };
  follow({ do: "list", namespace }, signal, frame => {
    if (frame.kind === "error") { fail(frame.error); return; }
    error.hidden = true;
    showConnection("live", false);
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
  }, text => {
    empty.hidden = true;
    fail(text);
    showConnection(text, true);
  });
}

/** Return the parts of the address: a resource, or the namespace of the list, or neither. */
function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  try {
    const [namespace, name] = path.split("/").map(decodeURIComponent);
    if (name) return { namespace, name };
  } catch { /* no address of this page */ }
  return { namespace: new URLSearchParams(query).get("namespace") };
}

async function route() {
  if (takeToken()) connect();
  leaving.abort();
  const { signal } = leaving = new AbortController();
  const { namespace, name } = address();
  if (!name && namespace !== null) sessionStorage.setItem("namespace", namespace.trim());
  $("home").href = listAddress();
  $("scope").hidden = Boolean(name);
  if (name) { showResource($("main"), namespace, name, listAddress(), signal); return; }
  if (location.hash !== listAddress()) history.replaceState(null, "", listAddress());
  const shown = sessionStorage.getItem("namespace") ?? (await session).namespace;
  if (signal.aborted) return;
  $("namespace").value = visible(shown);
  showList(shown, signal);
}

$("namespace").addEventListener("change", () => {
  sessionStorage.setItem("namespace", $("namespace").value.trim());
  location.hash = listAddress();
});
addEventListener("hashchange", () => { route(); $("main").focus({ preventScroll: true }); scrollTo(0, 0); });
session.then(({ context }) => setText($("context"), context));
takeToken();
connect();
route();
