// Runs the console's script against a server, in a page that is only as real as the script needs.
// node console_in_node.mjs SCRIPT URL KEY TEXT...: sends each TEXT, then prints {turns, state, model} as JSON.
import { readFileSync } from "node:fs";

const [script, url, key, ...texts] = process.argv.slice(2);

class Box {
  constructor() { this.value = this.textContent = this.className = ""; this.children = []; this.handlers = {}; }
  append(child) { this.children.push(child); child.parent = this; }
  remove() { this.parent?.children.splice(this.parent.children.indexOf(this), 1); }
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
  boxes.text.value = text;
  await boxes.form.handlers.submit({ preventDefault() {} });
}
const turns = page.getElementById("turns").children.map(box => [box.className, box.textContent]);
console.log(JSON.stringify({ turns, state: page.getElementById("state").textContent, model: page.title }));
process.exit(0);
