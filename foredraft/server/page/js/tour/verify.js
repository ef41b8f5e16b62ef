// Part 2: draft and verify.
import { h, number, s, slider } from "../dom.js";
import { MadeText } from "../text.js";
import { PROMPTS } from "../race.js";
import { collect, column, experiment, part, scene, user } from "./part.js";

const GUESS = ["mill", "by", "the", "sea", "side"], RIGHT = 3, FIX = "river";

function picture() {
  const box = (x, y, text, kind) => s("g", { class: `box ${kind}` }, s("rect", { x, y, width: 76, height: 36 }), s("text", { x: x + 38, y: y + 23, "text-anchor": "middle" }, text));
  const known = box(0, 60, "The old", "");
  const guesses = GUESS.map((text, i) => box(column(i), 130, text, "guess off"));
  const fix = box(column(RIGHT), 200, FIX, "fix off");
  const sweep = s("rect", { class: "sweep", x: -6, y: 120, height: 56, width: 0, rx: 10 });
  const captions = [[0.1, "One token is known."], [0.45, "A cheap drafter guesses five more."], [0.62, "One forward of the model scores all of them."],
    [0.86, "Three are what the model would have said."], [Infinity, "And it says itself what comes next: four tokens, one forward."]];
  const { svg, say } = scene({ label: "Five guesses, one forward, three accepted, one corrected", viewBox: "0 -4 430 262", y: 24, captions }, sweep, known, guesses, fix);
  const draw = (p) => {
    guesses.forEach((guess, i) => {
      const isJudged = p > 0.62 + 0.04 * i;
      guess.setAttribute("class", `box ${p < 0.1 + 0.06 * i ? "guess off" : !isJudged ? "guess" : i < RIGHT ? "yes" : "no"}`);
    });
    sweep.setAttribute("width", p > 0.45 && p < 0.62 ? 436 : 0);
    fix.setAttribute("class", `box fix ${p > 0.86 ? "" : "off"}`);
    say(p);
  };
  return { svg, draw };
}

export function verify() {
  const { svg, draw } = picture();
  const count = slider("Draft tokens", { min: 0, max: 16, value: 4, changed: () => trial.start() });
  const trial = experiment("The live model, editing code", count.field, async (show, signal) => {
    const made = new MadeText();
    const facts = h("p", {}, "…");
    show(facts, made.element);
    const [lane] = await collect({ messages: user(PROMPTS[0][1]), lanes: [{ num_draft_tokens: count.value }], max_tokens: 80 }, signal, (event) => { made.add(event); });
    made.end();
    const { stats } = lane.end;
    facts.replaceChildren(`${stats.committed} tokens in `, h("b", {}, `${stats.steps} forwards`), `: ${number(stats.committed / stats.steps)} a step. ${stats.accepted} of ${stats.drafted} guesses were right.`);
  });
  return part({
    count: "2 of 6", title: "Guess ahead, then check all guesses at once.", picture: svg, draw, experiment: trial.element,
    words: ["A drafter proposes a few tokens: a small head on the model, or simply a copy of what followed the same words before. It is cheap and often wrong.",
      "One forward of the model scores every guess in its place. As far as the guesses are what the model would have said itself, they are kept; at the first that is not, the model's own token takes its place."],
    question: { text: "Five tokens were drafted and the third is wrong. How many tokens does the step commit?", right: 2,
      answers: ["None", "Two", "Three", "Five"],
      because: "Two were right, and the same forward says what stands in place of the third. Every step commits at least one token, so a useless drafter costs time but never stops the text." },
  });
}
