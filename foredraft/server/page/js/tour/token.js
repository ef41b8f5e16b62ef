// One place in one text that two parts look at: what the live model gives the words that may stand there.
import { shown } from "../dom.js";
import { ASKED } from "./asked.js";
import { asked, collect } from "./part.js";

export const STORY = ASKED.likeliest.messages[0].content, BEGIN = ASKED.likeliest.begin;
const LAST = BEGIN.slice(ASKED.draft.begin.length);

const first = (lane) => lane.steps.find((step) => step.row.why)?.row;

// The likeliest four words, and all others together, at temperature 1.
export async function likeliest(signal) {
  const [lane] = await collect(asked("likeliest"), signal);
  const found = first(lane).why.laws[0].candidates.map((c) => [shown(c.text).trim(), c.model_prob]).sort((a, b) => b[1] - a[1]).slice(0, 4);
  return [...found, ["any other", Math.max(0, 1 - found.reduce((sum, [, p]) => sum + p, 0))]];
}

// The law there at a temperature: candidates with probability and noise, and the token that was written.
export async function lawAt(temperature, seed, signal) {
  const [lane] = await collect(asked("law", { temperature, seed }), signal);
  const row = first(lane);
  return { candidates: row.why.laws[0].candidates, taken: row.committed[0] };
}

// What a drafter drew with there: by token, and its favourite. Null where it was not asked within a few runs.
export async function draftAt(temperature, signal) {
  for (let seed = 0; seed < 3; seed++) {
    const [lane] = await collect(asked("draft", { temperature, seed }), signal);
    if (lane.steps.find((step) => step.row.committed.length)?.row.committed[0].text !== LAST) continue;
    const law = lane.steps.find((step) => step.decoding)?.row.why?.laws.find((each) => each.node === -1);
    const found = law?.candidates.filter((c) => c.draft_prob != null) ?? [];
    if (found.length) return { probs: new Map(found.map((c) => [c.token, c.draft_prob])), best: found.reduce((a, b) => (b.draft_prob > a.draft_prob ? b : a)) };
  }
  return null;
}
