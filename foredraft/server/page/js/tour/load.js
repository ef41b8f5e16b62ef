// Part: many requests at once fill the forward that guesses would have used.
import { h, number, scrub } from "../dom.js";
import { forwardMs } from "../api.js";
import { isDecoding, summary } from "../store.js";
import { asked, collect, compare, part, spoken } from "./part.js";

const AHEAD = 4, LOADS = [1, 4, 16], times = (x) => `${number(x, 2)}×`;
// Of each load, the tokens of a plain forward and of one with drafts.
export const SIZES = LOADS.flatMap((load) => [load, load * (1 + AHEAD)]);

export function load() {
  const said = scrub("Speed-up with sixteen requests", { min: 0.2, max: 4, step: 0.05, value: 1.5, show: times, blank: true, moved: () => it.guessed() });
  const figure = h("div", { class: "costs" }, h("p", { class: "note" }, "Here will stand what each load gains."));

  const it = part({
    key: "load",
    title: "Sixteen people ask at once. What do guesses bring now?",
    ask: [h("p", {}, "A server reads all requests in one forward: sixteen of them are sixteen tokens, and with four guesses each eighty."),
      h("p", {}, "With one request at a time guesses brought what you have seen. With sixteen at once, four guesses each, all will come ", said.element, " as fast.")],
    figure,
    answer: async (show, signal, isGuessed) => {
      figure.replaceChildren(h("p", { class: "note", role: "status" }, "Forwards of up to 80 tokens are being timed …"));
      const [lane] = await collect(asked("much"), signal), { perStep } = summary(lane.steps.filter(isDecoding));
      const ms = new Map();
      for (const n of SIZES) ms.set(n, Math.min(await forwardMs(n), await forwardMs(n)));
      const gains = LOADS.map((n) => (perStep * ms.get(n)) / ms.get(n * (1 + AHEAD))), most = Math.max(...gains, 1), found = gains.at(-1);
      figure.replaceChildren(...LOADS.map((n, i) => h("div", { class: "cost" }, h("span", {}, n === 1 ? "one request" : `${n} requests`), h("b", {}, times(gains[i])),
        h("div", { class: "stack", role: "img", "aria-label": `${times(gains[i])} with ${n}`, vars: { width: `${(100 * gains[i]) / most}%` } }, h("i", { class: "score", vars: { "--of": 1 } })),
        h("small", { class: "note" }, `${n} ${n === 1 ? "token" : "tokens"}: ${number(ms.get(n), 1)} ms · ${n * (1 + AHEAD)} tokens: ${number(ms.get(n * (1 + AHEAD)), 1)} ms`))));
      const outcome = [times(said.value), times(found), Math.abs(found - said.value) < 0.2];
      show(compare(isGuessed, ...outcome),
        h("p", {}, `A forward of “${spoken(asked("much").lanes[0].drafter)}” wrote ${number(perStep)} tokens of a request. Over the times of the forwards, plain against with guesses (drafting itself is left out), that is the gain of each bar.`),
        h("p", {}, found < 1 ? "The arithmetic that guesses used for nothing is now used by the other requests. " : "This machine still has arithmetic to spare. ", "That is why a busy server should guess less, and why this one measures what a guess costs before it makes one: at this load it would draft ", h("b", {}, found < 1 ? "nothing" : "as here"), "."));
      return outcome;
    },
    name: "Measure it",
  });
  return it;
}
