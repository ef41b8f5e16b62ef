// What happened since the page was opened: the dials and the replay read it, chat and race write it.
const MOST = 4000;
const steps = [];
const listeners = new Set();
let server = null;

export const setInfo = (info) => { server = info; };
export const getInfo = () => server;
export const all = () => steps;
export const listen = (listener) => { listeners.add(listener); return () => listeners.delete(listener); };

export const total = (times) => times.draft_ms + times.score_ms + times.verify_ms + times.learn_ms;
const sum = (of, f) => of.reduce((so, step) => so + f(step), 0);
const mean = (values) => sum(values, (value) => value) / values.length;

// The last runs, for the replay. One is kept with its request as soon as it has begun; step(event) and end(event) tell
// of it. Runs without a step are not listed.
const kept = [], MOST_RUNS = 6;
export const runs = () => kept.filter((run) => run.steps.length);

export function keepRun(title, request) {
  const run = { title, request, steps: [], sha256: null, isSeeded: request.coupling !== "drawn" };
  kept.push(run);
  if (kept.length > MOST_RUNS) kept.shift();
  return run;
}

// Whether a step decodes: its request had a token before. Reading the prompt is the same with every drafter.
export const isDecoding = (event) => event.decoding && event.row.committed.length > 0;

// Keep a step of a lane that may draft.
export function record(event) {
  if (!isDecoding(event)) return;
  if (!event.row.draft.tokens.length) keep(idle, event.times.score_ms + event.times.verify_ms);
  keep(steps, event);
  for (const listener of listeners) listener();
}

// What a step of plain decoding takes: the mean of those that this tab has seen of plain lanes, else of steps
// that drafted nothing, else what the server measured.
const plain = [], idle = [];
const ENOUGH = 12;

export function recordPlain(event) {
  if (isDecoding(event)) keep(plain, total(event.times));
}

export function plainStep(measured) {
  const seen = [plain, idle].find((times) => times.length >= ENOUGH)?.slice(-200);
  return seen ? { ms: mean(seen), seen: seen.length } : { ms: measured, seen: 0 };
}

function keep(list, item) {
  list.push(item);
  if (list.length > MOST) list.shift();
}

// The figures below have one definition each, which docs/understand/glossary.md repeats.

// Speed-up: the time that plain decoding takes for the same tokens, over the time that they took.
export const speedup = (of, plainMs) => (of.length ? (sum(of, (e) => e.row.committed.length) * plainMs) / sum(of, (e) => total(e.times)) : 1);

// The same of two lanes of one race.
export function raceSpeedup(fast, plain) {
  const times = plain.filter(isDecoding).map((step) => total(step.times));
  return times.length ? speedup(fast.filter(isDecoding), mean(times)) : 1;
}

// Milliseconds saved: the difference of the same two times.
export const saved = (step, plainMs) => step.row.committed.length * plainMs - total(step.times);

// What drafting lost or gained in a step, for the alarm: a step that drafted nothing could only lose what was
// spent on the question. That it took longer than another plain step is the machine's doing.
export const drafting = (step, plainMs) => (step.row.draft.tokens.length ? saved(step, plainMs) : -(step.times.draft_ms + step.times.learn_ms));

export function summary(of = steps) {
  const committed = sum(of, (e) => e.row.committed.length);
  const drafted = sum(of, (e) => e.row.draft.tokens.length);
  const accepted = sum(of, (e) => e.row.num_accepted);
  const places = byPlace(of), tried = sum(places, ({ count }) => count);
  return {
    steps: of.length, committed, drafted, accepted, places,
    draftMs: sum(of, (e) => e.times.draft_ms), scoreMs: sum(of, (e) => e.times.score_ms),
    otherMs: sum(of, (e) => e.times.verify_ms + e.times.learn_ms),
    perStep: of.length ? committed / of.length : 0,
    // Acceptance: of all drafted tokens the share that was committed.
    acceptance: drafted ? accepted / drafted : null,
    // Of all places that the draft had tokens for, when everything before was right: the share guessed right.
    placesRight: tried ? sum(places, ({ rate, count }) => rate * count) / tried : null,
  };
}

// The same by place. Other branches may be deeper: a place counts only if the draft had a token below the
// accepted path there.
function byPlace(of) {
  const tried = [], right = [];
  for (const { row } of of) {
    for (let place = 0; place <= row.path.length; place++) {
      if (!row.draft.parents.includes(place ? row.path[place - 1] : -1)) break;
      tried[place] = (tried[place] ?? 0) + 1;
      right[place] = (right[place] ?? 0) + (place < row.path.length ? 1 : 0);
    }
  }
  return tried.map((count, place) => ({ place: place + 1, count, rate: right[place] / count }));
}
