// Part: the reader changes the rule of acceptance, and sees what becomes of the text.
import { h, percent } from "../dom.js";
import { Bars, keys } from "../bars.js";
import { rule } from "../rule.js";
import { speculate } from "../theory.js";
import { answers, part } from "./part.js";
import { likeliest } from "./token.js";

const DRAWS = 40000, TRUE = "min(1, p / q)", OTHERS = ["min(1, 2 * p / q)", "p", "1", "sqrt(p / q)"];
// Tokens until a shift of a word's share shows at one in ten thousand, 99 times of 100: (z + z')² p (1 - p) / shift².
const tokensToSee = (p, shift) => Math.ceil((36.5 * p * (1 - p)) / shift ** 2);

export function breakIt() {
  const figure = h("div", {}, h("p", { class: "note" }, "…")), names = h("div", {}, keys(["q", "q, the draft"], ["p", "p, the model's"]));
  const box = h("input", { class: "mono rule-box", type: "text", spellcheck: "false", maxlength: 200, value: TRUE, "aria-label": "A draft is accepted with probability", oninput: () => it.guessed() });
  const few = [TRUE, ...OTHERS].map((text) => h("button", { class: "chip mono", type: "button", onclick: () => { box.value = text; } }, text));
  let bars = null, p = [], q = [], words = [], said = null;

  // A draft that is wrong where it matters: half of its mass runs against the model's.
  async function ready() {
    if (bars) return;
    words = await likeliest();
    p = words.map(([, prob]) => prob);
    q = [...p].sort((a, b) => a - b).map((x) => (x + 1 / p.length) / 2);
    bars = new Bars("How likely each word is", words.map(([text]) => text), 1, { show: (x) => percent(x).replace(" %", "") });
    q.forEach((x, i) => { bars.set(i, "q", x); bars.set(i, "p", p[i]); });
    figure.replaceChildren(bars.element);
  }

  const it = part({
    key: "break",
    title: "Break it: write a rule of your own",
    ask: [h("p", {}, "A drafted word is accepted with a probability that depends on p and q. The right one is the smaller of 1 and p/q. Accept more gladly, and more guesses stand; several programs have done so."),
      h("p", {}, "Accept with probability"), box, h("div", { class: "answers" }, few),
      h("p", {}, "Forty thousand words are then drawn, and refused ones replaced as in the part before. They will come out"),
      answers("What comes out", ["as the model writes them", "otherwise"], (i) => { said = i; it.guessed(); })],
    figure: [figure, names],
    ready,
    answer: async (show) => {
      await ready();
      const accept = rule(box.value), counts = p.map(() => 0);
      let accepted = 0;
      for (let i = 0; i < DRAWS; i++) { const drawn = speculate(p, q, { accept }); counts[drawn.token]++; accepted += drawn.accepted; }
      counts.forEach((count, i) => bars.set(i, "out", count / DRAWS));
      names.replaceChildren(keys(["q", "q, the draft"], ["p", "p, the model's"], ["out", "what came out"]));
      // The exact share of each word under this rule; draws only show it.
      const kept = q.map((x, i) => x * accept(p[i], x)), left = 1 - kept.reduce((a, b) => a + b, 0), over = p.map((x, i) => Math.max(0, x - q[i])), all = over.reduce((a, b) => a + b, 0);
      const shifts = kept.map((x, i) => x + (all ? (left * over[i]) / all : 0) - p[i]), worst = shifts.reduce((best, x, i) => (Math.abs(x) > Math.abs(shifts[best]) ? i : best), 0);
      const isTrue = Math.abs(shifts[worst]) < 1e-9, is = isTrue ? "as the model writes them" : "otherwise";
      show(h("p", {}, said === null ? ["They come out ", h("b", {}, is), "."] : ["You said ", h("b", { class: "said" }, ["as the model writes them", "otherwise"][said]), "; they come out ", h("b", {}, is), said === Number(!isTrue) ? ". Well guessed." : "."]),
        isTrue ? h("p", {}, `Accepted: ${percent(accepted / DRAWS)}. With this residual no other rule leaves every word as it was. Try one that accepts more.`)
          : h("p", {}, `Accepted: ${percent(accepted / DRAWS)}. “${words[worst][0]}” should have ${percent(p[worst])} and has `, h("b", { class: "bad" }, percent(p[worst] + shifts[worst])), `. Nobody sees that in one text. A test over ${tokensToSee(p[worst], shifts[worst]).toLocaleString("en")} such tokens does, and errs once in ten thousand times; `, h("span", { class: "mono" }, "foredraft audit"), " is made of such tests, and works on other people's servers too."));
      return [said === null ? box.value : ["the same", "otherwise"][said], is, said === Number(!isTrue)];
    },
    name: "Draw with this rule",
  });
  return it;
}
