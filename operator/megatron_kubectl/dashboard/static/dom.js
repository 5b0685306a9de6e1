// Elements, and requests to the dashboard's own server.

const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has("token")) {
  sessionStorage.setItem("token", fragment.get("token"));
  history.replaceState(null, "", "#/");
}

/** Make an element. Properties are set as given; `class`, `for`, `role`, `tabindex` and `aria-*` as attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(class|for|role|tabindex|scope|aria-.*)$/.test(name)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

/** Set the text of an element if it differs, so that selections and screen readers are not disturbed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const headers = () => ({ Authorization: `Bearer ${sessionStorage.getItem("token") ?? ""}` });

async function checked(response) {
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try { message = (await response.json()).error ?? message; } catch { /* not JSON */ }
  const error = new Error(message);
  error.status = response.status;
  throw error;
}

export async function get(path, signal) {
  return checked(await fetch(path, { headers: headers(), signal }));
}

export async function post(path, body) {
  const options = { method: "POST", headers: { ...headers(), "Content-Type": "application/json" } };
  return (await checked(await fetch(path, { ...options, body: JSON.stringify(body) }))).json();
}

/** Call onText with each piece of a text answer until it ends. */
export async function readText(path, signal, onText) {
  const reader = (await get(path, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let read; !(read = await reader.read()).done;) onText(read.value);
}

const RETRY_MS = [500, 1000, 2000, 5000];
const pause = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));

function connection(text, lost) {
  const shown = document.getElementById("connection");
  setText(shown, text);
  shown.classList.toggle("lost", lost);
}

/**
 * Call onFrame with each object of a stream of JSON lines. A stream that ends is opened again.
 * onFrame returns false while the API server does not report the shown state.
 */
export async function follow(path, signal, onFrame) {
  for (let failures = 0; !signal.aborted; failures++) {
    let rest = "";
    try {
      await readText(path, signal, text => {
        const lines = (rest + text).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          const live = onFrame(JSON.parse(line));
          failures = 0;
          connection(live ? "live" : "not live; retrying", !live);
        }
      });
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 400 || error.status === 401 || error.status === 403) {
        connection(error.message, true);
        return;
      }
    }
    if (signal.aborted) return;
    connection("disconnected from the dashboard's command; reconnecting", true);
    await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
  }
}

const GOOD = new Set(["Running"]);
const STILL = new Set(["Paused", "Suspended", "Stopped"]);
const BAD = new Set(["Failed", "Lost", "Unresponsive", "Unknown"]);

/** Show a state with its colour; the text alone is sufficient to read it. */
export function showState(element, reported) {
  // Engines report theirs in upper case.
  const state = reported === reported.toUpperCase() ? reported.charAt(0) + reported.slice(1).toLowerCase() : reported;
  const kind = BAD.has(state) ? "bad" : GOOD.has(state) ? "good" : STILL.has(state) ? "soft" : "busy";
  element.className = `state ${kind}`;
  setText(element, state);
}
