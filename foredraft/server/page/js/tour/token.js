// One place in one text that two parts look at: what the live model gives the words that may stand there.
import { shown } from "../dom.js";
import { collect, user } from "./part.js";

export const STORY = "Tell me a story about a mill.";
export const BEGIN = "The old mill stood by the";
const BEFORE = BEGIN.slice(0, BEGIN.lastIndexOf(" ")), LAST = BEGIN.slice(BEFORE.length);

const ask = (begin, drafter, more, signal) => collect({ messages: user(STORY), begin, lanes: [{ drafter }], ...more }, signal);
const first = (lane) => lane.steps.find((step) => step.row.why)?.row;

// The likeliest four words, and all others together, at temperature 1.
export async function likeliest(signal) {
  const [lane] = await ask(BEGIN, "none", { max_tokens: 1 }, signal);
  const found = first(lane).why.laws[0].candidates.map((c) => [shown(c.text).trim(), c.model_prob]).sort((a, b) => b[1] - a[1]).slice(0, 4);
  return [...found, ["any other", Math.max(0, 1 - found.reduce((sum, [, p]) => sum + p, 0))]];
}

// The law there at a temperature: candidates with probability and noise, and the token that was written.
export async function lawAt(temperature, seed, signal) {
  const [lane] = await ask(BEGIN, "none", { max_tokens: 1, temperature, seed }, signal);
  const row = first(lane);
  return { candidates: row.why.laws[0].candidates, taken: row.committed[0] };
}

// What a drafter drew with there: by token, and its favourite. Null where it was not asked within a few runs.
export async function draftAt(drafter, temperature, signal) {
  for (let seed = 0; seed < 3; seed++) {
    const [lane] = await ask(BEFORE, drafter, { max_tokens: 4, temperature, seed, coupling: "drawn" }, signal);
    if (lane.steps.find((step) => step.row.committed.length)?.row.committed[0].text !== LAST) continue;
    const law = lane.steps.find((step) => step.decoding)?.row.why?.laws.find((each) => each.node === -1);
    const found = law?.candidates.filter((c) => c.draft_prob != null) ?? [];
    if (found.length) return { probs: new Map(found.map((c) => [c.token, c.draft_prob])), best: found.reduce((a, b) => (b.draft_prob > a.draft_prob ? b : a)) };
  }
  return null;
}
