// Elements and their texts.

/** Return a text whose direction-changing characters are escapes, as on the command line. */
export const visible = text => String(text).replace(/\p{Bidi_Control}/gu, char => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);

/** Make an element. Properties are set as given; `class`, `for`, `role`, `tabindex` and `aria-*` as attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(class|for|role|tabindex|scope|aria-.*)$/.test(name)) element.setAttribute(name, value);
    else element[name] = value;
  }
  const present = children.filter(child => child !== null && child !== undefined);
  element.append(...present.map(child => child instanceof Node ? child : visible(child)));
  return element;
}

/** Set the text of an element if it differs, so that selections and screen readers are not disturbed. */
export function setText(element, text) {
  const shown = visible(text);
  if (element.textContent !== shown) element.textContent = shown;
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
