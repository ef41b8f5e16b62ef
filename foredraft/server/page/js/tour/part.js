// What the parts of the tour share: a question, the reader's guess, and then the live model's answer.
import { h } from "../dom.js";
import { run } from "../api.js";
import { getInfo } from "../store.js";
import { ASKED } from "./asked.js";
import { address, note, theirs } from "./progress.js";

// A part: `ask` is what is said before, with what the guess is made with; `figure` stands beside it. Once guessed()
// was called, or the reader would rather not, `answer(show, signal)` asks the model and shows what is to be said after.
// It returns what was said, what it is, and whether that is near. start() asks again; `ready()` is called when the part
// first comes into view.
export function part({ key, title, ask, figure, answer, ready = () => {}, name = "Ask the model" }) {
  const out = h("div", { class: "answer" });
  const go = h("button", { class: "button main", type: "button", disabled: true, onclick: () => start() }, name);
  const skip = h("button", { class: "chip", type: "button", onclick: () => start() }, "I have no idea");
  const hint = h("span", { class: "note" }, "Guess first.");
  const heading = h("h2", {}, title), count = h("p", { class: "count" });
  const element = h("section", { class: "part", "data-state": "asked", id: `tour-${key}`, "aria-label": title },
    h("div", { class: "asking" }, count, heading, ask, h("div", { class: "line go" }, go, skip, hint)),
    h("div", { class: "figure" }, figure), out);
  let current = null, isGuessed = false;
  const state = (is) => { element.dataset.state = is; };

  async function start() {
    current?.abort();
    const mine = (current = new AbortController());
    const wasAnswered = element.dataset.state === "answered";
    state("running");
    go.disabled = true;
    skip.hidden = hint.hidden = true;
    go.textContent = "The model answers …";
    const show = (...children) => { if (current === mine) out.replaceChildren(...children.flat().filter(Boolean)); };
    try {
      const outcome = await answer(show, mine.signal, isGuessed);
      if (current !== mine) return;
      state("answered");
      if (isGuessed && outcome) note(key, title, outcome);
      if (theirs.has(key)) out.append(h("p", { class: "note" }, `Whoever sent you the link said ${theirs.get(key).said}.`));
      if (getInfo()?.recorded || location.hash.startsWith("#tour")) history.replaceState(null, "", address(key));
      if (!wasAnswered) out.setAttribute("role", "status");
    } catch (error) {
      if (current !== mine || error.name === "AbortError") return;
      show(h("p", { class: "bad", role: "alert" }, error.message));
      state("asked");
    }
    go.disabled = false;
    go.textContent = "Ask again";
  }

  const guessed = () => { isGuessed = true; hint.hidden = true; if (element.dataset.state === "asked") go.disabled = false; };
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    Promise.resolve(ready()).catch((error) => out.replaceChildren(h("p", { class: "bad" }, error.message)));
  }, { rootMargin: "200px" });
  seen.observe(element);
  return { element, guessed, start, number: (i, of) => { count.textContent = `${i} of ${of}`; } };
}

// What the reader had said, beside what came out.
export function compare(isGuessed, said, found, isNear) {
  if (!isGuessed) return h("p", {}, "It is ", h("b", {}, found), ".");
  return h("p", {}, "You said ", h("b", { class: "said" }, said), "; it is ", h("b", {}, found), isNear ? ". Well guessed." : ".");
}

// A guess among a few; picked(i) is called at each choice.
export function answers(label, options, picked) {
  const buttons = options.map((option, i) => h("button", { class: "chip", type: "button", role: "radio", "aria-checked": "false", onclick: () => {
    buttons.forEach((button, j) => button.setAttribute("aria-checked", String(i === j)));
    picked(i);
  } }, option));
  return h("div", { class: "answers", role: "radiogroup", "aria-label": label }, buttons);
}

// Runs lanes to their end; onStep(event) sees each step.
export async function collect(request, signal, onStep = () => {}) {
  const lanes = request.lanes.map(() => ({ steps: [], end: null }));
  for await (const event of run(request, signal)) {
    if (event.type === "end") {
      if (event.error) throw new Error(event.error);
      lanes[event.lane].end = event;
    } else { lanes[event.lane].steps.push(event); await onStep(event, lanes); }
  }
  return lanes;
}

// A request of `ASKED` with some values changed; `num_draft_tokens` is that of the lane that names one.
export function asked(name, { num_draft_tokens: most, prompt, ...changes } = {}) {
  const { recorded, shows_why, lanes, ...request } = ASKED[name];
  const made = lanes.map((lane) => ({ ...lane, ...(lane.drafter ? { drafter: oneOf(...lane.drafter) } : {}), ...(most != null && lane.num_draft_tokens ? { num_draft_tokens: most } : {}) }));
  return { ...request, lanes: made, ...(prompt ? { messages: [{ role: "user", content: prompt }] } : {}), ...changes };
}

// The values that a recording has of a field of a request; null where the model is there and has them all.
export const values = (name, field) => (getInfo()?.recorded ? ASKED[name].recorded[field] : null);

// The best drafter that is served, and which of some others can be had. The table alone drafts little where a copy can.
const known = (name) => getInfo()?.drafters.includes(name);
export const served = () => ["draft_model", "self_draft", getInfo()?.drafter, "suffix", "ngram"].find((name) => name !== "none" && known(name));
export const oneOf = (...names) => names.map((name) => (name === "served" ? served() : name)).find(known) ?? served();
export const spoken = (name) => name.replaceAll("_", " ");
