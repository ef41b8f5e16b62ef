// What the parts of the tour share: words beside a picture that follows the scroll, a thing to try, a question.
import { h, s } from "../dom.js";
import { run } from "../api.js";

// A part. `draw(progress)` is called with 0 to 1 as the reader scrolls through it.
export function part({ count, title, words, picture, draw, experiment, question }) {
  const element = h("section", { class: "part", "aria-label": title },
    h("div", { class: "words" }, h("p", { class: "count" }, count), h("h2", {}, title), words.map((text) => h("p", {}, text)), experiment, ask(question)),
    h("div", { class: "picture" }, picture));
  let asked = false;
  const scrolled = () => {
    asked = false;
    if (!element.isConnected) return;
    const { top, height } = element.getBoundingClientRect();
    const progress = (innerHeight * 0.62 - top) / Math.min(height, innerHeight * 0.95);
    draw(Math.max(0, Math.min(1, progress)));
  };
  addEventListener("scroll", () => { if (!asked) { asked = true; requestAnimationFrame(scrolled); } }, { passive: true });
  draw(0);
  return { element, update: scrolled };
}

// A picture with a line that says what it shows by now: the first of `captions`, [until, text], whose time has not passed.
export function scene({ label, viewBox, captions, y, ...more }, ...shapes) {
  const said = s("text", { class: "said", x: 0, y });
  const svg = s("svg", { ...more, viewBox, role: "img", "aria-label": label }, ...shapes, said);
  const say = (t) => { said.textContent = captions.find(([until]) => t < until)[1]; };
  return { svg, say };
}

// Columns of the same few words side by side: where the one numbered i begins.
export const column = (i) => 86 * i;

// A bar that stands on `base`, so high.
export function raise(bar, base, height) {
  bar.setAttribute("y", base - height);
  bar.setAttribute("height", Math.max(0, height));
}

// A question with an explained answer: wrong answers may be followed by others.
function ask({ text, answers, right, because }) {
  const said = h("p", { class: "because", role: "status", hidden: true });
  const buttons = answers.map((answer, i) => h("button", { class: "chip", type: "button", onclick: () => {
    buttons[i].classList.add(i === right ? "right" : "wrong");
    if (i !== right) { said.hidden = false; said.textContent = "Not quite. Try another."; return; }
    buttons.forEach((button) => { button.disabled = true; });
    said.hidden = false;
    said.textContent = because;
  } }, answer));
  return h("div", { class: "question" }, h("h3", {}, "A question"), h("p", {}, text), h("div", { class: "answers", role: "group", "aria-label": "Answers" }, buttons), said);
}

// A box for something that really runs; `go(show)` may be started again at any time.
export function experiment(title, controls, go, name = "Run it") {
  const out = h("div", { class: "result", role: "status" });
  let current = null;
  const button = h("button", { class: "button", type: "button", onclick: () => start() }, name);
  const box = h("div", { class: "try" }, h("h3", { class: "live" }, title), h("div", { class: "line" }, controls, button), out);
  async function start() {
    current?.abort();
    const mine = (current = new AbortController());
    box.classList.add("running");
    button.textContent = "Running …";
    try {
      await go((...children) => { if (current === mine) out.replaceChildren(...children.flat().filter(Boolean)); }, mine.signal);
    } catch (error) {
      if (error.name !== "AbortError" && current === mine) out.replaceChildren(h("p", { class: "bad" }, error.message));
    }
    if (current !== mine) return;
    box.classList.remove("running");
    button.textContent = name;
  }
  return { element: box, start };
}

// Runs lanes to their end; onStep(event) sees each step.
export async function collect(request, signal, onStep = () => {}) {
  const lanes = request.lanes.map(() => ({ steps: [], end: null }));
  for await (const event of run(request, signal)) {
    if (event.type === "end") lanes[event.lane].end = event;
    else { lanes[event.lane].steps.push(event); onStep(event, lanes); }
  }
  return lanes;
}

export const user = (content) => [{ role: "user", content }];
