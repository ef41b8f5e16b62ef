// Part 3: the acceptance test and the residual.
import { h, number, percent, s, shown, slider } from "../dom.js";
import { normalised, overlap, residual, speculate } from "../theory.js";
import { collect, column, experiment, part, raise, scene, user } from "./part.js";

const WORDS = ["river", "sea", "road", "hill", "town"];
const P = [0.42, 0.1, 0.26, 0.14, 0.08], FAR = [0.12, 0.46, 0.08, 0.06, 0.28];
const mix = (far) => normalised(P.map((p, i) => (1 - far) * p + far * FAR[i]));
const TOP = 190, SCALE = 300;

function picture() {
  const q = mix(0.75), left = residual(P, q);
  const group = s("g", { class: "bars" });
  const bar = (kind, x, w) => { const r = s("rect", { class: kind, x, width: w, y: TOP, height: 0, rx: 3 }); group.append(r); return r; };
  const rects = WORDS.map((_, i) => ({ p: bar("p", column(i) + 6, 28), q: bar("q", column(i) + 38, 28), o: bar("overlap", column(i) + 6, 28), r: bar("rest", column(i) + 6, 28) }));
  const labels = WORDS.map((text, i) => s("text", { x: column(i) + 36, y: TOP + 18, "text-anchor": "middle" }, text));
  const captions = [[0.2, "What the model would say next."], [0.42, "What the drafter draws from (violet)."], [0.58, `Where they overlap, a guess is accepted: ${percent(overlap(P, q))}.`],
    [0.75, "What the draft cannot cover (orange) …"], [Infinity, "… made to sum to 1: the residual."]];
  const { svg, say } = scene({ label: "Target and draft probabilities, their overlap and the residual", viewBox: "0 -4 430 220", y: 14, captions }, group, labels);
  const set = (rect, base, value) => raise(rect, base, value * SCALE);
  const draw = (t) => {
    WORDS.forEach((_, i) => {
      const least = Math.min(P[i], q[i]);
      set(rects[i].p, TOP, t < 0.75 ? P[i] : 0);
      set(rects[i].q, TOP, t > 0.2 && t < 0.75 ? q[i] : 0);
      set(rects[i].o, TOP, t > 0.42 && t < 0.75 ? least : 0);
      set(rects[i].r, t < 0.75 ? TOP - least * SCALE : TOP, t > 0.58 ? (t < 0.75 ? P[i] - least : left[i]) : 0);
    });
    say(t);
  };
  return { svg, draw };
}

// What the live model gives its likeliest next tokens, and all others together.
async function likeliest(signal) {
  const [lane] = await collect({ messages: user("Name a colour."), lanes: [{ drafter: "none" }], max_tokens: 1 }, signal);
  const row = lane.steps.find((step) => step.row.why).row;
  const found = row.why.laws[0].candidates.map((c) => [shown(c.text).trim(), c.model_prob]).sort((a, b) => b[1] - a[1]).slice(0, 4);
  return [...found, ["any other", Math.max(0, 1 - found.reduce((sum, [, p]) => sum + p, 0))]];
}

export function accept() {
  const { svg, draw } = picture();
  const far = slider("Drafter's error", { min: 0, max: 1, step: 0.05, value: 0.75, show: (x) => number(x, 2), changed: () => trial.start() });
  const box = h("input", { type: "checkbox", onchange: () => trial.start() });
  let words = null;
  const trial = experiment("10,000 draws of the live model's next token", [far.field, h("label", { class: "field" }, box, "forget the residual")], async (show, signal) => {
    words ??= await likeliest(signal);
    // The drafter mistakes the model's order the more, the farther it is.
    const p = words.map(([, prob]) => prob), q = normalised(p.map((x, i) => (1 - far.value) * x + far.value * p[p.length - 1 - i]));
    const counts = p.map(() => 0), n = 10000;
    let accepted = 0;
    for (let i = 0; i < n; i++) { const drawn = speculate(p, q, box.checked); counts[drawn.token]++; accepted += drawn.accepted; }
    const worst = Math.max(...counts.map((count, i) => Math.abs(count / n - p[i])));
    show(h("p", {}, h("b", {}, `${percent(accepted / n)} accepted`), ` (the overlap is ${percent(overlap(p, q))}). `, worst > 0.02 ? h("span", { class: "bad" }, `The text is another: off by ${percent(worst)} somewhere.`) : "What came out has the model's own distribution."),
      h("div", { class: "rows" }, words.map(([text], i) => h("div", { class: "row pair" }, h("span", { class: "name" }, text), h("span", { class: "bar two" }, h("i", { vars: { "--of": p[i] } }), h("i", { vars: { "--of": counts[i] / n } })), h("span", {}, `${percent(p[i])} → ${percent(counts[i] / n)}`)))),
      h("p", { class: "note" }, "Grey, and first: what the model gives it after “Name a colour.” Violet: how often it came out. The drafts are drawn from the same figures in a wrong order."));
  }, "Draw");
  return part({
    count: "3 of 6", title: "Refuse just often enough, then draw from what is left.", picture: svg, draw, experiment: trial.element,
    words: ["At temperature 0 the test is equality. With chance involved, a drafted token x that the drafter drew with q(x) is accepted with probability min(1, p(x)/q(x)): where the draft claims more than the model would give, some is refused.",
      "What was refused is made up for by drawing from the residual, the part of p that the draft did not cover. The two parts add up to p, exactly, for any draft. Forget the residual, and the text is subtly another; some well-known programs have shipped that."],
    question: { text: "The drafter drew “sea” with q = 0.5, and the model gives it p = 0.3. How likely is it accepted?", right: 1,
      answers: ["30 %", "60 %", "50 %", "Always"],
      because: "p/q = 0.6. Drawn half of the time and kept in six of ten cases, “sea” comes out with 0.5 × 0.6 = 0.3: just what the model gives it. Tokens that the draft gave too little come from the residual." },
  });
}
