// The chat page: one conversation at a time, whose answers stream in.

import * as conversations from "./conversations.js";
import * as server from "./server.js";
import { visible } from "./text.js";
import { TurnView, button, element } from "./turns.js";

const $ = id => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "seed"];
const KEPT = [...NUMBERS, "system"];
const RETRY_MS = 5000;

let current = conversations.create(), running = null, retry = 0;

// --- the server -------------------------------------------------------------------------------------------------

async function connect() {
  clearTimeout(retry);
  try {
    const names = await server.models($("key").value);
    const chosen = $("model").value;
    $("model").replaceChildren(...names.map(name => new Option(visible(name), name, false, name === chosen)));
    document.title = visible(names[0]);
    const missing = await server.missing();
    $("state").textContent = missing.length ? visible(`waiting for: ${missing.join(", ")}`) : "ready";
    if (!missing.length) return;
  } catch (error) {
    $("state").textContent = visible(error instanceof server.RequestError ? error.message : `no connection: ${error.message}`);
    if (error.status === 401) {  // until a key is entered
      $("settings").open = true;
      $("key").focus();
      return;
    }
  }
  retry = setTimeout(connect, RETRY_MS);
}

function sampling() {
  const values = NUMBERS.filter(id => $(id).value !== "").map(id => [id, Number($(id).value)]);
  return Object.fromEntries(values.filter(([id, value]) => id !== "top_k" || value > 0));
}

// --- the conversation -------------------------------------------------------------------------------------------

const actionsOf = turn => turn.role === "user"
  ? { Edit: view => view.edit(text => askAgain(turn, text)) }
  : { Regenerate: () => askAgain(current.turns[current.turns.indexOf(turn) - 1]) };

function show(turn) {
  document.querySelector(".empty")?.remove();
  const view = new TurnView(turn, actionsOf(turn));
  $("turns").append(view.box);
  view.box.scrollIntoView({ block: "end" });
  return view;
}

function showConversation(conversation) {
  running?.abort();
  current = conversation;
  $("turns").replaceChildren();
  if (!current.turns.length) $("turns").append(element("p", "empty", "Ask something. The answer streams in as it is generated."));
  current.turns.forEach(show);
  document.body.classList.remove("history-open");
  $("toggle-history").setAttribute("aria-expanded", "false");
  listConversations();
}

function listConversations() {
  $("conversations").replaceChildren(...conversations.all().map(each => {
    const item = element("li");
    const open = button(each.title, () => showConversation(each));
    open.className = "open";
    if (each.id === current.id) open.setAttribute("aria-current", "true");
    item.append(open, button("×", () => {
      conversations.remove(each.id);
      if (each.id !== current.id) { listConversations(); return; }
      current.deleted = true;
      newChat();
    }, `Delete the conversation ${each.title}`));
    return item;
  }));
}

function keep(conversation) {
  if (conversation.deleted) return;
  const failed = conversation.turns.length ? conversations.save(conversation) : conversations.remove(conversation.id);
  if (failed) $("state").textContent = failed;
  listConversations();
}

function newChat() {
  showConversation(conversations.create());
  $("text").focus();
}

// Everything from this question on is asked again, with another text if one is given.
function askAgain(question, text = question.content) {
  running?.abort();
  current.turns.length = current.turns.indexOf(question);
  showConversation(current);
  ask(text);
}

async function ask(text) {
  const conversation = current, question = { role: "user", content: text }, answer = { role: "assistant", content: "" };
  conversation.turns.push(question, answer);
  keep(conversation);
  show(question);
  const view = show(answer);
  view.update({ ended: false });
  const abort = running = new AbortController();
  $("send").textContent = "Stop";
  $("spoken").textContent = "The model answers.";
  try {
    if (!$("model").value) await connect();
    if (!$("model").value) throw new Error($("state").textContent);
    await receive(conversation, answer, view, abort.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.error = error.message;
      connect();
    } else if (!answer.content && !answer.reasoning) {
      answer.error = "Stopped before the first token.";
    }
  }
  if (running === abort) {
    running = null;
    $("send").textContent = "Send";
  }
  view.update({ ended: true });
  if (!conversation.turns.includes(answer)) return;  // asked again meanwhile
  if (conversation === current) $("spoken").textContent = visible(answer.error ?? answer.content);
  keep(conversation);
}

async function receive(conversation, answer, view, signal) {
  const told = [];
  for (const turn of conversation.turns.slice(0, conversation.turns.indexOf(answer))) {
    // A question without an answer is not repeated.
    if (turn.role === "assistant" && !turn.content && !turn.reasoning) told.pop(); else told.push(turn);
  }
  const messages = told.map(({ role, content, reasoning }) => ({ role, content, ...(reasoning && { reasoning_content: reasoning }) }));
  if ($("system").value) messages.unshift({ role: "system", content: $("system").value });
  const main = $("turns"), begin = performance.now();
  let first = 0, last = 0, ended = false, drawn = true;
  const draw = () => {
    if (drawn) return;
    drawn = true;
    const atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 80;
    view.update({ ended: false });
    if (atEnd) main.scrollTop = main.scrollHeight;
  };
  try {
    for await (const event of server.chat({ model: $("model").value, messages, ...sampling() }, $("key").value, signal)) {
      const choice = event.choices[0], { content, reasoning_content: thought } = choice?.delta ?? {};
      ended ||= Boolean(choice?.finish_reason);
      if (content || thought) {
        last = performance.now();
        first ||= last;
        if (thought) answer.reasoning = (answer.reasoning ?? "") + thought;
        if (content) answer.content += content;
        if (drawn) {
          drawn = false;
          requestAnimationFrame(draw);  // a fast model sends several tokens in a frame
        }
      }
      if (event.usage) {
        const { prompt_tokens: prompt, completion_tokens: completion } = event.usage;
        const rate = completion > 1 && last > first ? { rate: (completion - 1) / ((last - first) / 1000) } : {};
        answer.figures = { prompt, completion, ...(first && { first: first - begin }), ...rate };
      }
    }
  } finally {
    drawn = true;
  }
  if (!ended) throw new Error("The connection was lost before the answer had ended.");
}

// --- the page ---------------------------------------------------------------------------------------------------

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = $("text").value.trim();
  if (!text) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape") running?.abort(); });
$("key").addEventListener("change", connect);
$("new").addEventListener("click", newChat);
$("export").addEventListener("click", () => conversations.download(`chat-${current.id}`, [current]));
$("export-all").addEventListener("click", () => conversations.download("chats", conversations.all()));
$("delete-all").addEventListener("click", () => {
  if (!confirm("Delete all conversations of this page from the browser?")) return;
  conversations.all().forEach(each => conversations.remove(each.id));
  current.deleted = true;
  newChat();
});
$("toggle-history").addEventListener("click", () => {
  const open = document.body.classList.toggle("history-open");
  $("toggle-history").setAttribute("aria-expanded", String(open));
});
addEventListener("storage", listConversations);

for (const [id, value] of Object.entries(conversations.settings())) if (KEPT.includes(id)) $(id).value = value;
for (const id of KEPT) $(id).addEventListener("change", () =>
  conversations.saveSettings(Object.fromEntries(KEPT.map(each => [each, $(each).value]))));
showConversation(current);
connect();
