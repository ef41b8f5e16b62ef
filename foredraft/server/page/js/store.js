// What happened since the page was opened: the dials read it, chat and race write it.
const MOST = 4000;
const steps = [];
const listeners = new Set();
let about = null;

export const setInfo = (told) => { about = told; };
export const getInfo = () => about;
export const all = () => steps;
export const listen = (told) => { listeners.add(told); return () => listeners.delete(told); };

// Keep a step of a lane that may draft. Prompts are read the same way by everyone, and do not count.
export function record(event) {
  if (event.row.num_read > 1 || !event.row.committed.length) return;
  recordPlain(event);
  steps.push(event);
  if (steps.length > MOST) steps.shift();
  for (const told of listeners) told();
}

// What a step of plain decoding takes: as seen in this tab, of whichever lane, else as the server measured it.
const plain = [];
const ENOUGH = 12;

export function recordPlain(event) {
  if (event.row.num_read > 1 || event.row.draft.tokens.length || event.row.committed.length !== 1) return;
  plain.push(total(event.times));
  if (plain.length > MOST) plain.shift();
}

export function plainStep(measured) {
  const recent = plain.slice(-200).sort((a, b) => a - b);
  return recent.length >= ENOUGH ? { ms: recent[recent.length >> 1], seen: recent.length } : { ms: measured, seen: 0 };
}

// Milliseconds that speculation saved in a step. One that drafted nothing could only lose what was spent on
// the question; that it took longer than another plain step is the machine's doing.
export function saved(step, plainMs) {
  return step.row.draft.tokens.length ? step.row.committed.length * plainMs - total(step.times) : -(step.times.draft_ms + step.times.learn_ms);
}

export const total = (times) => times.draft_ms + times.score_ms + times.verify_ms + times.learn_ms;

export function summary(of = steps) {
  const sum = (f) => of.reduce((a, step) => a + f(step), 0);
  const committed = sum((e) => e.row.committed.length);
  const drafted = sum((e) => e.row.draft.tokens.length);
  const accepted = sum((e) => e.row.num_accepted);
  return {
    steps: of.length, committed, drafted, accepted,
    draftMs: sum((e) => e.times.draft_ms), scoreMs: sum((e) => e.times.score_ms),
    otherMs: sum((e) => e.times.verify_ms + e.times.learn_ms),
    perStep: of.length ? committed / of.length : 0,
    byDepth: byDepth(of),
  };
}

// Of the drafts that reached a depth, and were right until there: how many were right there.
function byDepth(of) {
  const tried = [], right = [];
  for (const { row } of of) {
    const depth = [];
    row.draft.parents.forEach((parent, node) => { depth[node] = parent < 0 ? 0 : depth[parent] + 1; });
    const deepest = Math.max(-1, ...depth);
    for (let d = 0; d <= Math.min(row.path.length, deepest); d++) {
      tried[d] = (tried[d] ?? 0) + 1;
      if (d < row.path.length) right[d] = (right[d] ?? 0) + 1;
    }
  }
  return tried.map((count, d) => ({ depth: d + 1, count, rate: (right[d] ?? 0) / count }));
}
