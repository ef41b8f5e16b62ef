// Part: what an acceptance brings, by the textbook, and where this model stands.
import { h, number, percent, scrub } from "../dom.js";
import { Frame, ticks } from "../charts.js";
import { isDecoding, summary } from "../store.js";
import { tokensPerStep } from "../theory.js";
import { asked, collect, compare, part, spoken, values } from "./part.js";

const RIGHT = 0.7;

export function much() {
  const said = scrub("Tokens a forward", { min: 1, max: 5, step: 0.1, value: 3, show: (x) => number(x, 1), blank: true, moved: () => it.guessed() });
  const figure = h("div", {});
  let most = 4, at = RIGHT, here = null;

  // Tokens a forward by how often a place is guessed right, and this model's point on it.
  function curve() {
    const points = Array.from({ length: 51 }, (_, i) => [i / 50, tokensPerStep(i / 50, most)]);
    const frame = new Frame(380, 220, [0, 1], [0, most + 1], `Tokens a forward with ${most} draft tokens, by how often a place is guessed right: ${number(tokensPerStep(at, most))} at ${percent(at)}`);
    frame.axes(ticks([0, 0.25, 0.5, 0.75, 1], percent), ticks([1, most + 1]), "a place is guessed right").level(1).line(points, "machine");
    if (here) frame.dot(here.placesRight, here.perStep, `this model: ${number(here.perStep)}`);
    figure.replaceChildren(frame.svg);
  }

  const it = part({
    key: "much",
    title: "A guess is right seven times in ten. How much is that worth?",
    ask: [h("p", {}, "Four tokens are guessed ahead, and each is right with 70 %, if those before it were. The first wrong one ends it, and the model's own token comes on top."),
      h("p", {}, "On average a forward then writes ", said.element, " tokens.")],
    figure,
    answer: async (show, signal, isGuessed) => {
      const found = tokensPerStep(RIGHT, 4), outcome = [number(said.value, 1), `${number(found)} tokens`, Math.abs(found - said.value) < 0.3];
      const [lane] = await collect(asked("much", { num_draft_tokens: most }), signal);
      const seen = summary(lane.steps.filter(isDecoding));
      here = seen.placesRight == null ? null : seen;
      curve();
      const sum = h("b", {}), tell = () => { sum.textContent = number(tokensPerStep(at, most)); };
      const share = scrub("A place is guessed right", { min: 0, max: 1, step: 0.05, value: at, show: percent, moved: (x) => { at = x; tell(); } });
      const size = scrub("Draft tokens", { min: 1, max: 16, value: most, values: values("much", "num_draft_tokens"), changed: (n) => { most = n; it.start(); } });
      tell();
      show(compare(isGuessed, ...outcome),
        h("p", {}, "1 + 0.7 + 0.7² + 0.7³ + 0.7⁴: a token counts only if all before it stood, so the fourth guess brings 0.24 of a token and a tenth would bring 0.03. With ", size.element, " guesses that are right with ", share.element, " it is ", sum, "."),
        here ? h("p", {}, `Here “${spoken(asked("much").lanes[0].drafter)}” was right at ${percent(here.placesRight)} of the places, in a story about a lighthouse, and a forward wrote ${number(here.perStep)} tokens: the dot. It need not lie on the line, as guesses are not alike: some places are easy, others hopeless.`) : null);
      return outcome;
    },
  });
  curve();
  return it;
}
