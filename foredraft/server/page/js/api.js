// What the page asks of the server, and what went wrong in words. A key is asked for only where the server wants one.
import { h } from "./dom.js";

const KEY = "foredraft-key";
const GONE = "The server does not answer. Is it still running?";
const CUT = "The connection to the server broke before the end.";

export class ServerError extends Error {
  constructor(message, status = 0) { super(message); this.status = status; }
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

let asking = null;

// One question at a time, whoever else needs the answer; closing it gives up.
function askForKey() {
  asking ??= new Promise((resolve, reject) => {
    const input = h("input", { type: "password", autocomplete: "off", "aria-label": "API key", required: true });
    const why = sessionStorage.getItem(KEY) ? "The server does not know the key that was given. " : "";
    const dialog = h("dialog", { "aria-labelledby": "wants-key" }, h("form", { method: "dialog" },
      h("h2", { id: "wants-key" }, "This server wants a key"),
      h("p", { class: "note" }, `${why}It is kept in this tab only.`), input,
      h("button", { class: "button main", value: "given" }, "Go on")));
    dialog.addEventListener("close", () => {
      asking = null;
      dialog.remove();
      if (dialog.returnValue !== "given") { reject(new ServerError("This server wants a key. Load the page again to give one.", 401)); return; }
      sessionStorage.setItem(KEY, input.value.trim());
      resolve();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(GONE);
  }
  if (response.status === 401) { await askForKey(); return ask(path, options); }
  if (!response.ok) throw new ServerError(await problem(response), response.status);
  return response;
}

async function problem(response) {
  const body = await response.json().catch(() => ({}));
  const said = body.error?.message ?? body.detail ?? `The server answered ${response.status}.`;
  const text = typeof said === "string" ? said : said[0]?.msg ?? JSON.stringify(said);
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

export const info = async () => (await ask("/page/info")).json();

export async function forwardMs(numTokens) {
  const body = JSON.stringify({ num_tokens: numTokens });
  return (await (await ask("/page/forward", { method: "POST", body })).json()).ms;
}

// Runs a request and yields its events; ends with the last lane's, or raises what happened instead.
// Leaving the loop, or aborting, ends it on the server.
export async function* run(request, signal) {
  const response = await ask("/page/run", { method: "POST", body: JSON.stringify(request), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "", left = request.lanes.length;
  try {
    while (left) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError(CUT);
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.type === "error") throw new ServerError(event.message);
        if (event.type === "end") left -= 1;
        yield event;
      }
    }
  } catch (error) {
    throw error.name === "AbortError" || error instanceof ServerError ? error : new ServerError(CUT);
  } finally {
    reader.cancel().catch(() => {});
  }
}
