// Part 7: when it does not help, and what then is lost.
import { h, number, percent, scrub } from "../dom.js";
import { keys } from "../bars.js";
import { isDecoding, raceSpeedup, summary } from "../store.js";
import { asked, collect, compare, part, spoken, values } from "./part.js";

const times = (x) => `${number(x, 2)}×`;

export function limits() {
  const drafter = asked("limits").lanes[1].drafter;
  const figure = h("div", { class: "costs" });
  const said = scrub("Speed-up", { min: 0.2, max: 3, step: 0.05, value: 1.5, show: times, blank: true, moved: (to) => { sketch(to); it.guessed(); } });
  let most = 16, at = 1.2;

  // The time of a token, as the reader has it.
  function sketch(speed) {
    if (!figure.querySelector(".sketch") && figure.children.length) return;
    const full = Math.max(1, 1 / speed);
    figure.replaceChildren(...[["plain", 1, "time of a token"], [`“${spoken(drafter)}”, ${most} ahead`, 1 / speed, "your guess"]].map(([name, part, note]) => h("div", { class: "cost sketch" }, h("span", {}, name), h("b", {}, note), h("div", { class: "stack", vars: { width: `${(100 * part) / full}%` } }, h("i", { class: "guess", vars: { "--of": 1 } })))));
  }

  // Milliseconds a token, by what took them.
  function costs(lanes) {
    const parts = lanes.map(({ steps }) => { const f = summary(steps.filter(isDecoding)); return [f.draftMs, f.scoreMs, f.otherMs].map((ms) => ms / Math.max(1, f.committed)); });
    const sums = parts.map((ms) => ms.reduce((a, b) => a + b, 0)), full = Math.max(...sums);
    figure.replaceChildren(...["plain", `“${spoken(drafter)}”, ${most} ahead`, "as served"].map((name, i) => h("div", { class: "cost" }, h("span", {}, name), h("b", {}, `${number(sums[i], 1)} ms a token`),
      h("div", { class: "stack", role: "img", "aria-label": `draft ${number(parts[i][0], 1)} ms, forward ${number(parts[i][1], 1)} ms, rest ${number(parts[i][2], 1)} ms`, vars: { width: `${(100 * sums[i]) / full}%` } }, ["draft", "score", "other"].map((kind, k) => h("i", { class: kind, vars: { "--of": parts[i][k] } }))))),
      keys(["draft", "drafting"], ["score", "the model's forwards"], ["other", "the rest"]));
  }

  const it = part({
    key: "limits",
    title: "Does it always help?",
    ask: [h("p", {}, `The model is to invent names for ships, at temperature 1.2: hardly anything can be foreseen. The drafter “${spoken(drafter)}” guesses sixteen tokens ahead at every step, whatever it is worth.`),
      h("p", {}, "Compared with no drafter, the text will come ", said.element, " as fast.")],
    figure,
    answer: async (show, signal, isGuessed) => {
      figure.replaceChildren(h("p", { class: "note", role: "status" }, "All three are running, in turns …"));
      const lanes = await collect(asked("limits", { num_draft_tokens: most, temperature: at }), signal);
      costs(lanes);
      const { stats } = lanes[1].end, found = raceSpeedup(lanes[1].steps, lanes[0].steps), own = raceSpeedup(lanes[2].steps, lanes[0].steps);
      const size = scrub("Draft tokens", { min: 1, max: 32, value: most, values: values("limits", "num_draft_tokens"), changed: (n) => { most = n; it.start(); } });
      const heat = scrub("Temperature", { min: 0, max: 1.5, step: 0.1, value: at, values: values("limits", "temperature"), show: (x) => number(x, 1), changed: (x) => { at = x; it.start(); } });
      const outcome = [times(said.value), times(found), Math.abs(found - said.value) < 0.15];
      show(compare(isGuessed, ...outcome),
        h("p", {}, `${stats.accepted} of ${stats.drafted} guesses stood (${percent(stats.drafted ? stats.accepted / stats.drafted : 0)}). `, found < 0.97 ? ["The others were looked at for nothing, and that is what it cost: ", h("b", { class: "bad" }, `${percent(1 - found)} of the speed`), "."] : found < 1.1 ? "That about pays for looking at the others." : "Even so it pays here.", " The text is the same in all three."),
        h("p", {}, "A step, which is a draft and its forward, must pay: one that takes 1.6 times as long must bring more than 1.6 tokens. So this server weighs, before each step, what guesses cost here against how often they have stood lately, and guesses less, or nothing: ", h("em", {}, "as served"), ", the third bar, ", h("b", {}, times(own)), "."),
        h("p", {}, "Let the drafter guess ", size.element, " tokens ahead, at temperature ", heat.element, "."));
      return outcome;
    },
  });
  sketch(1);
  return it;
}
