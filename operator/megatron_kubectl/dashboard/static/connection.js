// The connection to the dashboard's own server: one WebSocket for all requests of this page.

import { setText } from "./dom.js";

const RETRY_MS = [500, 1000, 2000, 5000];
/** The server sends a message every 5 s. */
const SILENCE_MS = 15_000;
const BAD_TOKEN = 4401;
const DISCONNECTED = "disconnected from the dashboard's command";

const requests = new Map();
let socket = null, ready = false, lastId = 0, failures = 0, silence = 0, retry = 0, seconds = 0, begun;

/** Namespace shown first, and context. */
export const session = new Promise(resolve => { begun = resolve; });

/** Show whether the page is live. */
export function showConnection(text, lost) {
  const shown = document.getElementById("connection");
  setText(shown, text);
  shown.classList.toggle("lost", lost);
}

/** Keep the token of the URL that the command printed, for all tabs of this address. Returns whether it has one. */
export function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return false;
  localStorage.setItem("token", token);
  history.replaceState(null, "", "#/");
  return true;
}

const send = message => socket.send(JSON.stringify(message));

export function connect() {
  clearTimeout(retry);
  drop();
  const mine = socket = new WebSocket(`ws://${location.host}/api/socket`);
  mine.addEventListener("open", () => { if (mine === socket) send({ token: localStorage.getItem("token") ?? "" }); });
  mine.addEventListener("message", event => { if (mine === socket) receive(JSON.parse(event.data)); });
  mine.addEventListener("close", event => { if (mine === socket) reconnect(event.code === BAD_TOKEN && event.reason); });
  listen();
}

function listen() {
  clearTimeout(silence);
  silence = setTimeout(reconnect, SILENCE_MS);
}

/** Leave the connection. Requests that are not sent again fail. */
function drop() {
  const left = socket;
  socket = null;
  ready = false;
  clearTimeout(silence);
  left?.close();
  for (const each of [...requests.values()]) each.dropped();
}

function reconnect(rejection) {
  drop();
  showConnection(rejection || `${DISCONNECTED}; reconnecting`, true);
  // The user opens the right URL, here or in another tab.
  if (!rejection) retry = setTimeout(connect, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
}

addEventListener("storage", event => { if (event.key === "token") connect(); });

function receive(message) {
  listen();
  if (message.session) {
    ready = true;
    failures = 0;
    seconds = message.session.seconds;
    localStorage.setItem("token", message.session.token);  // the token of the URL may be valid only once
    begun(message.session);
    showConnection("live", false);
    for (const [id, each] of requests) send({ id, ...each.body });
  } else if (message.id !== undefined) {
    requests.get(message.id)?.receive(message);
  }
}

/** Add a request. Its functions end it at most once. */
function begin(body, { receive, dropped, signal }) {
  const id = ++lastId;
  const end = () => requests.delete(id);
  requests.set(id, { body, receive: message => receive(message, end), dropped: () => dropped(end) });
  signal?.addEventListener("abort", () => { if (end() && ready) send({ id, end: true }); });
  if (ready) send({ id, ...body });
  return id;
}

/** Request values until the signal ends it, also after a reconnect. */
export function follow(body, signal, onValue, onError) {
  const receive = (message, end) => {
    if ("value" in message) onValue(message.value);
    else if (end()) onError(message.error ?? "the dashboard's command ended the request");
  };
  begin(body, { receive, dropped: () => {}, signal });
}

/** Request values until they end, the connection is lost or the signal ends it. Returns the last one. */
export function request(body, { signal, onValue = () => {} } = {}) {
  return new Promise((resolve, reject) => {
    if (!ready) { reject(new Error(DISCONNECTED)); return; }
    let last;
    const receive = (message, end) => {
      if ("value" in message) onValue(last = message.value);
      else if (end()) "error" in message ? reject(new Error(message.error)) : resolve(last);
    };
    begin(body, { receive, dropped: end => { if (end()) reject(new Error(DISCONNECTED)); }, signal });
  });
}

/**
 * Request a verb. The server asks again before it executes it, and this page agrees only within the time-out. The
 * error says whether the verb was executed.
 */
export function verb(body) {
  return new Promise((resolve, reject) => {
    if (!ready) { reject(new Error(`not executed: ${DISCONNECTED}`)); return; }
    const deadline = performance.now() + 1000 * seconds;
    let sent = false, result, timer = 0;
    const fail = (end, cause) => {
      if (!end()) return;
      clearTimeout(timer);
      reject(new Error(sent ? `${cause} after the request was sent; the state shows whether it was executed` : `not executed: ${cause}`));
    };
    const limit = (end, milliseconds) => {
      clearTimeout(timer);
      timer = setTimeout(() => fail(end, `no answer within ${seconds} s`), milliseconds);
    };
    const receive = (message, end) => {
      if (message.ask) {
        if (performance.now() > deadline) { fail(end, `no answer within ${seconds} s`); return; }
        sent = true;
        send({ id, go: true });
        limit(end, 1000 * seconds + 2000);  // the server has a limit of its own, and a more exact answer
      } else if ("value" in message) {
        result = message.value;
      } else if (end()) {
        clearTimeout(timer);
        "error" in message ? reject(new Error(message.error)) : resolve(result);
      }
    };
    const id = begin(body, { receive, dropped: end => fail(end, DISCONNECTED) });
    limit(() => requests.delete(id), 1000 * seconds);
  });
}
