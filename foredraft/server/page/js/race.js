// The race: one prompt and seed, plain and speculative, on one clock; two equal hashes at the end.
import { drafterChoice, laneOf } from "./drafters.js";
import { h, number, slider } from "./dom.js";
import { run } from "./api.js";
import { sharing } from "./share.js";
import { legend, MadeText } from "./text.js";
import { keepRun, raceSpeedup, record, recordPlain } from "./store.js";

export const PROMPTS = [
  ["Edit code", "Rename the variable total to result and keep everything else:\n\ndef mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)"],
  ["Summarise", "Summarise in two sentences, in the words of the text: The old mill stands by the river where the road bends. For two hundred years the mill ground the grain of the valley. When the railway came, grain went to the city, and the mill stood still. Now the old mill by the river is a museum."],
  ["Open chat", "Tell me a short story about a lighthouse keeper."],
];

class Lane {
  constructor(title, isFast) {
    this.made = new MadeText({ label: `${title}: text; arrow keys choose a token, Enter asks why` });
    this.clock = h("span", { class: "clock" }, "0.00 s");
    this.bar = h("i", {});
    this.facts = h("dl", {});
    this.#tell("–");
    this.element = h("article", { class: `lane ${isFast ? "fast" : "plainly"}` }, h("header", {}, h("h2", {}, title), this.clock), h("div", { class: "track" }, this.bar), this.made.element, this.facts);
    this.clockMs = 0;
    this.tokens = 0;
    this.steps = 0;
  }

  step(event, mostTokens) {
    this.clockMs = event.clock_ms;
    this.tokens += event.row.committed.length;
    this.steps += event.row.committed.length ? 1 : 0;
    this.made.ghost.replaceChildren();
    this.made.add(event);
    this.clock.textContent = `${number(this.clockMs / 1000)} s`;
    this.bar.style.setProperty("--done", Math.min(1, this.tokens / mostTokens));
    this.made.element.scrollTop = this.made.element.scrollHeight;
    this.#tell("–");
  }

  #tell(speed) {
    const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    this.facts.replaceChildren(fact("tokens", this.tokens ?? 0), fact("forwards", this.steps ?? 0), fact("per forward", this.steps ? number(this.tokens / this.steps) : "–"), fact("tokens/s", speed));
  }

  end(event) {
    this.result = event;
    this.made.end();
    this.made.element.scrollTop = 0;
    this.bar.style.setProperty("--done", 1);
    this.tokens = event.num_tokens;
    this.#tell(number(event.tokens_per_s, 1));
  }
}

export class Race {
  constructor() {
    this.prompt = h("textarea", { rows: 3, maxlength: 20000, "aria-label": "Prompt", oninput: () => this.#mark() }, PROMPTS[0][1]);
    this.chips = PROMPTS.map(([title, text], i) => h("button", { class: "chip", type: "button", onclick: () => { this.prompt.value = text; this.#mark(); } }, title));
    this.#mark();
    this.temperature = slider("Temperature", { min: 0, max: 1.2, step: 0.1, value: 0, show: (x) => number(x, 1) });
    this.drafter = drafterChoice();
    this.seed = h("input", { type: "number", min: 0, max: 999999, value: 7, "aria-label": "Seed" });
    this.go = h("button", { class: "button main", type: "button", onclick: () => (this.abort ? this.abort.abort() : this.start()) }, "Start the race");
    this.lanesAt = h("div", { class: "lanes" });
    this.finish = h("div", { role: "status" });
    this.element = h("div", { class: "race" },
      h("section", { class: "lead" }, h("h1", {}, "Same prompt, same seed, same text. One of them sooner."),
        h("p", {}, "Both lanes really run, now, on this machine. They take turns, and each clock counts its own lane's steps alone, so neither slows the other down.")),
      h("div", { class: "desk" },
        h("div", { class: "asked" }, h("div", { class: "chips", role: "group", "aria-label": "Prompts" }, this.chips), this.prompt),
        h("div", { class: "starter" }, h("label", { class: "field" }, "Drafter", this.drafter), this.temperature.field, h("label", { class: "field" }, "Seed", this.seed), this.go)),
      this.lanesAt, this.finish, legend());
    this.#lanes();
  }

  #mark() {
    this.chips.forEach((chip, i) => chip.setAttribute("aria-pressed", String(PROMPTS[i][1] === this.prompt.value)));
  }

  #lanes() {
    this.lanes = [new Lane("Plain", false), new Lane(`Speculative: ${this.drafter.value.replaceAll("_", " ") || "as served"}`, true)];
    this.lanesAt.replaceChildren(...this.lanes.map((lane) => lane.element));
    this.finish.replaceChildren();
  }

  async start() {
    this.#lanes();
    const mostTokens = 120;
    const prompt = this.prompt.value.trim();
    if (!prompt) { this.prompt.focus(); return; }
    const request = { messages: [{ role: "user", content: prompt }], lanes: [{ drafter: "none" }, laneOf(this.drafter)], temperature: this.temperature.value, seed: Number(this.seed.value) || 0, max_tokens: mostTokens };
    const kept = keepRun(`Race: ${prompt}`, { ...request, lanes: [request.lanes[1]] });
    this.abort = new AbortController();
    this.go.textContent = "Stop";
    this.lanesAt.scrollIntoView({ block: "nearest" });
    try {
      for await (const event of run(request, this.abort.signal)) {
        const lane = this.lanes[event.lane];
        if (event.type === "end") { lane.end(event); if (event.lane === 1) kept.sha256 = event.sha256; }
        else {
          if (event.lane === 1) { record(event); kept.steps.push(event); } else recordPlain(event);
          lane.step(event, mostTokens);
        }
        if (event.type === "step") await new Promise(requestAnimationFrame);
      }
      this.#over();
    } catch (error) {
      this.finish.replaceChildren(h("p", { class: error.name === "AbortError" ? "note" : "bad" }, error.name === "AbortError" ? "Stopped before the end." : error.message));
      this.lanes.forEach((lane) => lane.made.end());
    }
    this.abort = null;
    this.go.textContent = "Race again";
  }

  #over() {
    const [plain, fast] = this.lanes.map((lane) => lane.result);
    if (plain.error || fast.error) throw new Error(plain.error ?? fast.error);
    const times = raceSpeedup(this.lanes[1].made.steps, this.lanes[0].made.steps);
    const same = plain.sha256 === fast.sha256;
    this.lanes[times >= 1 ? 1 : 0].element.classList.add("won");
    this.finish.replaceChildren(h("div", { class: "finish" },
      h("p", { class: "times" }, `${number(times, 2)}×`),
      h("p", { class: "note" }, "the tokens a second of plain decoding. The clocks count the reading of the prompt as well, which no drafter speeds up."), verdict(times, fast),
      h("div", { class: "hashes" }, h("p", { class: same ? "same" : "differ" }, same ? "The same text, byte for byte" : "The texts differ"),
        h("p", { class: "mono", "data-lane": "plain" }, plain.sha256), h("p", { class: "mono", "data-lane": "speculative" }, fast.sha256),
        h("p", {}, "SHA-256 of either lane's text")),
      h("p", { class: "note" }, h("a", { href: "#replay" }, "See where its time went")),
      h("details", { class: "show" }, h("summary", {}, "A picture to show to others"), sharing({ plain, fast, speedup: times, prompt: this.prompt.value.trim(), temperature: this.temperature.value }))));
    this.finish.firstChild.scrollIntoView({ block: "nearest" });
  }
}

// What a race that was not won says.
function verdict(times, fast) {
  if (!fast.stats.drafted) return h("p", {}, "The controller found that drafting would not pay now, and drafted nothing: both lanes decoded plainly.");
  return times >= 1 ? null : h("p", {}, "Speculation cost more than it gave here: this text repeats little, or the drafter was wrong too often.");
}
