// What the parts of the tour share: a question, the reader's guess, and then the live model's answer.
import { h } from "../dom.js";
import { run } from "../api.js";
import { getInfo } from "../store.js";

// A part: `ask` is what is said before, with what the guess is made with; `figure` stands beside it. Once guessed()
// was called, or the reader would rather not, `answer(show, signal)` asks the model and shows what is to be said after.
// start() asks again; `ready()` is called when the part first comes into view.
export function part({ title, ask, figure, answer, ready = () => {}, name = "Ask the model" }) {
  const out = h("div", { class: "answer" });
  const go = h("button", { class: "button main", type: "button", disabled: true, onclick: () => start() }, name);
  const skip = h("button", { class: "chip", type: "button", onclick: () => start() }, "I have no idea");
  const hint = h("span", { class: "note" }, "Guess first.");
  const heading = h("h2", {}, title), count = h("p", { class: "count" });
  const element = h("section", { class: "part", "data-state": "asked", "aria-label": title },
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
      await answer(show, mine.signal, isGuessed);
      if (current !== mine) return;
      state("answered");
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

export const user = (content) => [{ role: "user", content }];
// The served drafter, and which of some others can be had.
const known = (name) => getInfo()?.drafters.includes(name);
export const served = () => (getInfo()?.drafter === "none" ? oneOf("suffix", "ngram") : getInfo()?.drafter);
export const oneOf = (...names) => names.find(known) ?? getInfo()?.drafters.find((name) => name !== "none");
export const spoken = (name) => name.replaceAll("_", " ");
