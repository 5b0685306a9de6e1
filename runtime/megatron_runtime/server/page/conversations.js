// Conversations in the browser's local storage: one key each, so that two tabs do not overwrite each other's.
//
// A conversation: {id, title, changed (ms since 1970), turns: [{role, content, reasoning?, error?, figures?}]}.

const PREFIX = "megatron.chat.", SETTINGS = "megatron.settings";

const read = key => {
  try { return JSON.parse(localStorage.getItem(key)); } catch { return null; }
};

export const create = () => ({ id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "", changed: 0, turns: [] });

// The last changed one first.
export function all() {
  const found = Object.keys(localStorage).filter(key => key.startsWith(PREFIX)).map(read);
  return found.filter(each => each && Array.isArray(each.turns)).sort((a, b) => b.changed - a.changed);
}

// Returns what failed, as where the storage is full or forbidden; empty if it is kept.
export function save(conversation) {
  conversation.changed = Date.now();
  conversation.title ||= conversation.turns[0]?.content.trim().slice(0, 60) ?? "";
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return "";
  } catch (error) {
    return `The browser does not keep this conversation (${error.name}): export it, and delete others.`;
  }
}

export const remove = id => localStorage.removeItem(PREFIX + id);

export const settings = () => read(SETTINGS) ?? {};

export function saveSettings(values) {
  try { localStorage.setItem(SETTINGS, JSON.stringify(values)); } catch { /* they hold until the page is closed */ }
}

// Offers a file with conversations to the user.
export function download(name, conversations) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(conversations, null, 1)], { type: "application/json" }));
  link.download = `${name}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
