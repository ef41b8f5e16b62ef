// In place of the page's api.js: the same answers, from a recording (recording-*.js), in the time that they took.
import { sleep } from "./dom.js";

const recordings = globalThis.FOREDRAFT ?? {};
export const names = Object.keys(recordings);
let chosen = names[0];
export const choose = (name) => { chosen = recordings[name] ? name : names[0]; return chosen; };

export class ServerError extends Error {}

export const info = async () => ({ ...recordings[chosen].info, recorded: true });
export const forwardMs = async (numTokens) => {
  const ms = recordings[chosen].forwards[numTokens];
  if (ms === undefined) throw new ServerError(`A forward of ${numTokens} tokens was not recorded.`);
  return ms;
};

// As tools/tour/record.py writes a request: names in order, without blanks.
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  return `{${Object.keys(value).sort().map((name) => `${JSON.stringify(name)}:${canonical(value[name])}`).join(",")}}`;
}

export async function* run(request, signal) {
  const found = recordings[chosen].runs[canonical(request)];
  if (!found) throw new ServerError("This was not recorded. With “foredraft serve” the model answers it live.");
  let clock = 0;
  for (const event of found) {
    await sleep(Math.min(60, Math.max(0, event.clock_ms - clock)));
    if (signal?.aborted) throw new DOMException("left", "AbortError");
    clock = Math.max(clock, event.clock_ms);
    yield event;
  }
}

