// Requests to the server that serves this page.

async function message(reply) {
  try { return (await reply.json()).error.message; } catch { return `HTTP ${reply.status}`; }
}

export class RequestError extends Error {
  constructor(text, status) { super(text); this.status = status; }
}

async function request(path, key, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const reply = await fetch(path, { ...options, headers });
  if (!reply.ok) throw new RequestError(await message(reply), reply.status);
  return reply;
}

// Names of the models, first the resource's own.
export async function models(key) {
  return (await (await request("v1/models", key)).json()).data.map(model => model.id);
}

// What the server waits for; empty if it is ready. The probe answers 503 until then.
export async function missing() {
  const found = await (await fetch("readyz")).json();
  return found.ready ? [] : found.missing;
}

// Events of a streamed answer, until [DONE].
export async function* chat(body, key, signal) {
  const options = { method: "POST", signal, body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }) };
  const reply = await request("v1/chat/completions", key, options);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let read; !(read = await reader.read()).done;) {
    const parts = (rest + read.value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: {")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new RequestError(event.error.message, 0);
      yield event;
    }
  }
}
