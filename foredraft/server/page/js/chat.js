// The chat: a conversation whose replies show how they were made.
import { choice, h, number, s, slider } from "./dom.js";
import { drafterChoice, laneOf } from "./drafters.js";
import { run } from "./api.js";
import { legend, MadeText, PACES, Player } from "./text.js";
import { keepRun, record } from "./store.js";

const IDEAS = [
  ["Edit code", "Rename the variable total to result and keep everything else:\n\ndef mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)"],
  ["Repeat with a change", "Rewrite this in the past tense: The old mill stands by the river. Every morning she opens the mill, sweeps the floor of the mill and sells flour to the town."],
  ["Explain", "Explain in a few sentences why the sky is blue."],
];

export class Chat {
  constructor() {
    this.messages = [];
    this.pace = choice("Pace", PACES, "real", () => this.player?.step());
    this.temperature = slider("Temperature", { min: 0, max: 1.2, step: 0.1, value: 0, show: (x) => number(x, 1), moved: (x) => { this.test.hidden = !x; } });
    this.drafter = drafterChoice();
    this.coupling = h("select", {}, h("option", { value: "seeded" }, "equality"), h("option", { value: "drawn" }, "ratio p/q"));
    // At temperature 0 both are the same question.
    this.test = h("label", { class: "field", hidden: true, title: "Equality: the seed fixes what the model draws, and a guess must be that. Ratio: guesses are drawn, and kept with probability p/q." }, "Test", this.coupling);
    this.input = h("textarea", { rows: 1, maxlength: 20000, placeholder: "Say something", "aria-label": "Message", onkeydown: (e) => this.#key(e) });
    this.send = h("button", { class: "button main send", type: "submit", "aria-label": "Send" }, arrow());
    this.turns = h("div", { class: "turns", "aria-live": "off" });
    this.hello = h("section", { class: "hello" }, h("h1", {}, "Watch a language model write ahead of itself."),
      h("p", {}, "A small drafter guesses the next words, the model checks all of them in one pass, and the text is exactly what the model alone would have written. Click any word to see why it is there."),
      h("div", { class: "chips", role: "group", "aria-label": "To begin with" }, h("span", { class: "note" }, "Try one:"), IDEAS.map(([title, text]) => h("button", { class: "chip", type: "button", onclick: () => this.ask(text) }, title))), legend());
    this.under = h("div", { class: "under", hidden: true }, legend(), h("button", { class: "chip", type: "button", onclick: () => this.reset() }, "New chat"));
    this.form = h("form", { class: "composer", onsubmit: (e) => { e.preventDefault(); this.submit(); } },
      h("div", { class: "box" }, this.input, this.send),
      h("div", { class: "settings" }, this.temperature.field, h("label", { class: "field" }, "Drafter", this.drafter), this.test, h("span", { class: "field" }, "Pace", this.pace.element),
        this.next = h("button", { class: "button main", type: "button", hidden: true, onclick: () => this.player?.step() }, "Next step →")));
    this.element = h("div", { class: "chat" }, this.hello, this.turns, this.under, this.form);
    this.turns.hidden = true;
    document.addEventListener("keydown", (e) => { if (e.key === "ArrowRight" && e.target === document.body) this.player?.step(); });
  }

  submit() {
    if (this.abort) { this.#stop(); return; }
    const text = this.input.value.trim();
    if (!text) return;
    this.input.value = "";
    this.ask(text);
  }

  reset() {
    this.#stop();
    this.messages = [];
    this.turns.replaceChildren();
    this.turns.hidden = this.under.hidden = true;
    this.hello.hidden = false;
    this.input.focus();
  }

  // The model may have ended long before a slow text does: both end here.
  #stop() {
    this.abort?.abort();
    this.player?.stop();
  }

  async ask(text) {
    if (this.abort) return;
    this.hello.hidden = true;
    this.turns.hidden = this.under.hidden = false;
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    const made = new MadeText();
    const facts = h("p", { class: "facts", role: "status" });
    this.turns.append(h("p", { class: "turn user" }, text), h("article", { class: "turn reply" }, made.element, facts));
    const player = this.player = new Player(made, () => this.pace.value);
    player.waiting = (is) => { this.next.hidden = !is; };
    made.onAdd = () => this.#follow();
    const playing = player.run();
    this.#running(new AbortController());
    scrollTo({ top: document.body.scrollHeight });
    let end = null, problem = null;
    const request = this.#request(), kept = keepRun(`Chat: ${text}`, request);
    try {
      for await (const event of run(request, this.abort.signal)) {
        if (event.type === "step") { record(event); kept.steps.push(event); player.push(event); } else { end = event; kept.sha256 = end.sha256; }
      }
    } catch (error) {
      if (error.name !== "AbortError") problem = error.message;
    }
    player.finish();
    await playing;
    const seen = made.tokens.map((token) => token.textContent).join("");
    if (seen) messages.push({ role: "assistant", content: seen });
    else this.#takeBack(messages, text);
    problem ??= end?.error;
    if (problem) facts.append(h("span", { class: "bad" }, problem));
    else if (player.isStopped) facts.append("Stopped.");
    else facts.append(...tell(end));
    this.#running(null);
    this.#follow();
  }

  // Nothing came of a question: it can be asked again.
  #takeBack(messages, text) {
    messages.pop();
    if (messages === this.messages) this.input.value ||= text;
  }

  #request() {
    const temperature = this.temperature.value;
    // An odd number, so that the first is the reader's.
    return { messages: this.messages.slice(-15), lanes: [laneOf(this.drafter)], temperature, coupling: temperature ? this.coupling.value : "seeded", seed: Math.floor(Math.random() * 1e9), max_tokens: 256 };
  }

  #running(abort) {
    this.abort = abort;
    this.send.setAttribute("aria-label", abort ? "Stop" : "Send");
    this.send.replaceChildren(abort ? square() : arrow());
    document.body.classList.toggle("running", Boolean(abort));
  }

  #follow() {
    const below = this.under.getBoundingClientRect().bottom + 12 - this.form.getBoundingClientRect().top;
    if (below > 0 && below < 400) scrollBy({ top: below });
  }

  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
  }
}

function tell(end) {
  const { stats } = end;
  const fact = (value, words) => h("span", {}, h("b", {}, value), ` ${words}`);
  return [fact(stats.committed, "tokens"), fact(stats.steps, stats.steps === 1 ? "step" : "steps"), fact(number(stats.steps ? stats.committed / stats.steps : 0), "committed a step (plain: 1)"),
    fact(`${stats.accepted} of ${stats.drafted}`, "drafted accepted"), fact(number(end.tokens_per_s, 1), "tokens/s")];
}

const icon = (d) => s("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d }));
const arrow = () => icon("M8 13V3M3.500 7.500 8 3l4.500 4.500");
const square = () => icon("M4 4h8v8H4z");
