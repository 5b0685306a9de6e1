// The state of the resource that this server belongs to. The coordinator reports no changes: it is asked again.

import { visible } from "./text.js";

const REFRESH_MS = 3000;
const $ = id => document.getElementById(id);
let timer = 0;

function rows(body, table) {
  body.replaceChildren(...table.map(cells => {
    const row = document.createElement("tr");
    for (const cell of cells) row.insertCell().textContent = visible(cell);
    return row;
  }));
}

function facts(pairs) {
  $("facts").replaceChildren(...pairs.map(([name, value]) => {
    const pair = document.createElement("div"), title = document.createElement("dt"), shown = document.createElement("dd");
    title.textContent = name;
    shown.textContent = visible(value);
    pair.append(title, shown);
    return pair;
  }));
}

function show(status) {
  $("model").textContent = document.title = visible(status.model);
  const serving = status.engines.filter(engine => engine.serving).length;
  facts([["State", status.state], ["Engines that serve", `${serving}/${status.engines.length}`], ["Requests in engines", status.in_flight], ["Queued", status.queued], ["Epoch", status.epoch]]);
  rows($("engines"), status.engines.map(engine => [engine.name, engine.state, engine.serving ? "yes" : "no", engine.in_flight, engine.epoch, engine.ranks, `${engine.seconds_since_heartbeat.toFixed(1)} s ago`]));
  $("adapters-table").hidden = !status.adapters.length;
  rows($("adapters"), status.adapters.map(adapter => [adapter.name, adapter.engines]));
}

async function refresh() {
  clearTimeout(timer);
  let error = "";
  try {
    const key = $("key").value;
    const reply = await fetch("v1/status", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    const body = await reply.json();
    if (reply.ok) show(body);
    else error = body.error.message;
    $("state").textContent = reply.ok ? "live" : "not available";
    if (reply.status === 401) { $("key").focus(); return; }  // until a key is entered
  } catch (failure) {
    error = `No connection: ${failure.message}`;
    $("state").textContent = "no connection";
  } finally {
    $("error").hidden = !error;
    $("error").textContent = visible(error);
  }
  timer = setTimeout(refresh, REFRESH_MS);
}

$("form").addEventListener("submit", event => { event.preventDefault(); refresh(); });
document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else refresh(); });
refresh();
