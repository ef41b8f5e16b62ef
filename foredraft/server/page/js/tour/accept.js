// Part 3: the acceptance test and the residual. The reader is the drafter.
import { h, percent, toggle } from "../dom.js";
import { Bars, keys } from "../bars.js";
import { overlap, speculate } from "../theory.js";
import { part } from "./part.js";
import { BEGIN, likeliest, STORY } from "./token.js";

const DRAWS = 10000;

export function accept() {
  const figure = h("div", {}, h("p", { class: "note" }, "The model is being asked for its words …"));
  const names = h("div", {}, keys(["q", "your draft, in per cent: drag the bars"]));
  let words = null, bars = null, q = [], isOver = false;

  async function ready() {
    words ??= await likeliest();
    q = words.map(() => 1 / words.length);
    bars = new Bars("How likely each word is", words.map(([text]) => text), 1, { show: (x) => percent(x).replace(" %", ""), moved: move });
    q.forEach((x, i) => { bars.set(i, "q", x); bars.draggable(i, "q", x); });
    figure.replaceChildren(bars.element);
  }

  // One bar goes where it is dragged, and the others share what is left as they did.
  function move(i, to) {
    if (isOver) return;
    const others = 1 - q[i];
    q = q.map((x, j) => (j === i ? to : others > 0 ? (x * (1 - to)) / others : (1 - to) / (q.length - 1)));
    q.forEach((x, j) => { bars.set(j, "q", x); bars.columns[j].say(x); });
    it.guessed();
  }

  const it = part({
    key: "accept",
    title: "You are the drafter. How often will the model agree?",
    ask: [h("p", {}, `The model writes a story, as it was asked: “${STORY}” It begins: `, h("b", {}, `“${BEGIN} …”`), " Any word may follow, each with its own probability."),
      h("p", {}, "Draft the next one: drag the bars to where you think they are. Then I draw a word from your bars, ten thousand times, and the model tests each. It has to do it so that, in the end, every word comes out as often as without you.")],
    figure: [figure, names],
    ready,
    answer: async (show) => {
      await (words ? null : ready());
      isOver = true;
      bars.fix();
      const p = words.map(([, prob]) => prob), share = overlap(p, q);
      p.forEach((x, i) => bars.set(i, "p", x));
      names.replaceChildren(keys(["q", "q, your draft"], ["p", "p, the model's"], ["out", "what came out"]));
      const result = h("p", {});
      const draw = (isForgetful) => {
        const counts = p.map(() => 0);
        let accepted = 0;
        for (let i = 0; i < DRAWS; i++) { const drawn = speculate(p, q, { isForgetful }); counts[drawn.token]++; accepted += drawn.accepted; }
        counts.forEach((count, i) => bars.set(i, "out", count / DRAWS));
        const off = counts.map((count, i) => Math.abs(count / DRAWS - p[i])), worst = off.indexOf(Math.max(...off));
        result.replaceChildren(h("b", {}, `${percent(accepted / DRAWS)} of your words were accepted`), `; where your bars and the model's overlap is ${percent(share)}. `,
          off[worst] > 0.02 ? h("span", { class: "bad" }, `“${words[worst][0]}” should come out in ${percent(p[worst])} and came out in ${percent(counts[worst] / DRAWS)}: that is another text.`) : "And every word came out as often as the model alone writes it.");
      };
      const rest = toggle("What is drawn instead of a refused word", ["what you left uncovered", "the model's bars once more"], draw);
      draw(false);
      show(result,
        h("p", {}, "Call your bar q and the model's p. Where you drew a word too often (q above p), it is accepted with probability p/q: just often enough. A refused word is replaced by one drawn from ", rest.element, "; the right way, that is the part of p above q, the ", h("em", {}, "residual"), ". Accepted and replaced ones then add up to p, whatever you drafted. (Try the other way: some well-known programs shipped that mistake.)"));
      return ["with these bars", `${percent(share)} accepted`, share > 0.6];
    },
    name: "Let the model test it",
  });
  return it;
}
