// Runs the console's script against a server, in a page that is only as real as the script needs.
// node console_in_node.mjs SCRIPT URL KEY TEXT...: sends each TEXT, then prints {turns, state, model, typed} as JSON.
// A TEXT after "STOP " is stopped before its answer begins.
import { readFileSync } from "node:fs";

const [script, url, key, ...texts] = process.argv.slice(2);

class Box {
  constructor() { this.value = this.text = this.className = ""; this.children = []; this.handlers = {}; }
  get textContent() { return this.text + this.children.map(child => child.textContent).join("|"); }
  set textContent(text) { this.text = text; this.children = []; }
  get lastChild() { return this.children.at(-1); }
  append(...boxes) { for (const child of boxes) { this.children.push(child); child.parentNode = this; } }
  remove() { this.parentNode?.children.splice(this.parentNode.children.indexOf(this), 1); }
  replaceChildren() { this.children = []; }
  addEventListener(name, handler) { this.handlers[name] = handler; }
  scrollIntoView() {}
  focus() {}
}

const boxes = {};
const page = {
  title: "",
  getElementById: id => (boxes[id] ??= new Box()),
  createElement: () => new Box(),
  querySelector: () => null,
};
const direct = (path, options) => fetch(new URL(path, url), options);
page.getElementById("key").value = key;
page.getElementById("temperature").value = "0";
page.getElementById("max_tokens").value = "64";

new Function("document", "fetch", readFileSync(script, "utf8"))(page, direct);
for (const text of texts) {
  boxes.text.value = text.replace(/^STOP /, "");
  const answered = boxes.form.handlers.submit({ preventDefault() {} });
  if (text.startsWith("STOP ")) {
    while (page.getElementById("send").textContent !== "Stop") await new Promise(resolve => setTimeout(resolve, 5));
    await boxes.form.handlers.submit({ preventDefault() {} });
  }
  await answered;
}
const turns = page.getElementById("turns").children.map(box => [box.className, box.textContent]);
console.log(JSON.stringify({ turns, state: boxes.state.textContent, model: page.title, typed: boxes.text.value }));
process.exit(0);
