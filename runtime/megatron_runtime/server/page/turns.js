// How a turn looks: text or Markdown, reasoning, figures and buttons.

import { visible } from "./text.js";
import markdownit from "./vendor/markdown-it.esm.min.js";

// Elements written as HTML are shown as text, and images are not loaded: answers cannot reach other servers.
const markdown = markdownit({ html: false, linkify: true }).disable("image");
const link = markdown.renderer.rules.link_open ?? ((tokens, index, options, _, self) => self.renderToken(tokens, index, options));
markdown.renderer.rules.link_open = (tokens, index, ...rest) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer");
  return link(tokens, index, ...rest);
};

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = visible(text);
  return made;
}

export function button(text, action, label = "") {
  const made = element("button", "", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", visible(label));
  made.addEventListener("click", action);
  return made;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea");  // a page served by HTTP from another machine has no clipboard object
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function copyButton(text) {
  const made = button("Copy", async () => {
    await copy(text());
    made.textContent = "Copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}

function renderMarkdown(box, text) {
  box.innerHTML = visible(markdown.render(text));
  for (const scrolling of box.querySelectorAll("pre, table")) scrolling.tabIndex = 0;
  for (const pre of box.querySelectorAll("pre")) {
    const frame = element("div", "code");
    pre.replaceWith(frame);
    frame.append(pre, copyButton(() => pre.textContent));
  }
}

const figuresText = ({ prompt, completion, first, rate }) => [
  prompt !== undefined && `${prompt} + ${completion} tokens`,
  first !== undefined && `first token ${(first / 1000).toFixed(2)} s`,
  rate !== undefined && `${rate.toFixed(1)} tokens/s`,
].filter(Boolean).join(" · ");

// One turn on the page; update() shows it again. Reasoning is unfolded until the answer's text begins.
export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.box = element("article", `turn ${turn.role}`);
    this.box.setAttribute("aria-label", turn.role === "user" ? "You" : "Model");
    this.reasoning = element("details");
    this.reasoning.append(element("summary", "", "Reasoning"), this.thoughts = element("div"));
    this.content = element("div", turn.role === "user" ? "content" : "content markdown");
    this.error = element("p", "error");
    this.footer = element("footer");
    this.update({ ended: true });
  }

  update({ ended }) {
    const { role, content, reasoning, error, figures } = this.turn;
    const parts = [];
    if (reasoning) {
      this.thoughts.textContent = visible(reasoning);
      if (!this.reasoning.isConnected) this.reasoning.open = !ended;
      if (content && !this.content.isConnected) this.reasoning.open = false;
      parts.push(this.reasoning);
    }
    if (content) {
      if (role === "user") this.content.textContent = visible(content); else renderMarkdown(this.content, content);
      parts.push(this.content);
    }
    if (error) {
      this.error.textContent = visible(error);
      parts.push(this.error);
    }
    if (ended) {
      this.footer.replaceChildren(copyButton(() => this.turn.content));
      for (const [name, action] of Object.entries(this.actions)) this.footer.append(button(name, () => action(this)));
      if (figures) this.footer.append(element("span", "figures", figuresText(figures)));
      parts.push(this.footer);
    }
    // Unchanged parts stay, so that a selection and the focus in them stay.
    const wanted = new Set(parts);
    for (const child of [...this.box.children]) if (!wanted.has(child)) child.remove();
    parts.forEach((part, index) => { if (this.box.children[index] !== part) this.box.insertBefore(part, this.box.children[index] ?? null); });
  }

  // Replaces the text by an editor; `sent` gets the new text.
  edit(sent) {
    const editor = element("div", "editor"), text = element("textarea");
    text.value = this.turn.content;
    text.setAttribute("aria-label", "Edit message");
    const end = () => { editor.replaceWith(this.content); this.update({ ended: true }); };
    const buttons = element("div");
    buttons.append(button("Send", () => text.value.trim() && sent(text.value.trim())), button("Cancel", end));
    text.addEventListener("keydown", event => { if (event.key === "Escape") end(); });
    editor.append(text, buttons);
    this.content.replaceWith(editor);
    this.footer.remove();
    text.focus();
  }
}
