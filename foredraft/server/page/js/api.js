// What the page asks of the server. A key is asked for only where the server wants one.
import { h } from "./dom.js";

const KEY = "foredraft-key";

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function askForKey() {
  return new Promise((resolve) => {
    const input = h("input", { type: "password", autocomplete: "off", "aria-label": "API key", required: true });
    const dialog = h("dialog", {}, h("form", { method: "dialog" },
      h("h2", {}, "This server wants a key"),
      h("p", { class: "note" }, "It is kept in this tab only."), input,
      h("button", { class: "button main" }, "Go on")));
    dialog.addEventListener("close", () => { sessionStorage.setItem(KEY, input.value); dialog.remove(); resolve(); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.status === 401) { await askForKey(); return ask(path, options); }
  if (!response.ok) throw new Error(await problem(response));
  return response;
}

async function problem(response) {
  const body = await response.json().catch(() => ({}));
  const said = body.error?.message ?? body.detail ?? `the server answered ${response.status}`;
  return typeof said === "string" ? said : said[0]?.msg ?? JSON.stringify(said);
}

export const info = async () => (await ask("/page/info")).json();

export async function forwardMs(numTokens) {
  const body = JSON.stringify({ num_tokens: numTokens });
  return (await (await ask("/page/forward", { method: "POST", body })).json()).ms;
}

// Runs a request and yields its events. Leaving the loop, or aborting, ends it on the server.
export async function* run(request, signal) {
  const response = await ask("/page/run", { method: "POST", body: JSON.stringify(request), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const event = JSON.parse(part.slice(6));
        if (event.type === "error") throw new Error(event.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
