// Part 6: when it does not help.
import { h, number, percent, s, slider } from "../dom.js";
import { Frame, ticks } from "../charts.js";
import { getInfo, raceSpeedup } from "../store.js";
import { onMachine, textbook } from "../theory.js";
import { collect, experiment, part, user } from "./part.js";

const CURVE = [[1, 10], [17, 14]];

function picture() {
  const holder = s("svg", { viewBox: "-40 -40 480 260", role: "img", "aria-label": "Speed-up against how often guesses are right, for four draft tokens" });
  const draw = (t) => {
    const a = 0.95 - 0.9 * t, curve = getInfo()?.curve ?? CURVE;
    const frame = new Frame(390, 160, [0, 1], [0, 5], "");
    frame.axes(ticks([0, 0.5, 1], percent), ticks([1, 3, 5], (v) => `${v}×`), "a guess is right").level(1);
    const points = (f) => Array.from({ length: 41 }, (_, i) => [i / 40, f(i / 40)]);
    frame.line(points((x) => textbook(x, 4)), "book").line(points((x) => onMachine(x, 4, curve, 0.25 * curve[0][1])), "machine");
    const speed = onMachine(a, 4, curve, 0.25 * curve[0][1]);
    frame.dot(a, speed, `${number(speed, 2)}×`);
    holder.replaceChildren(...frame.svg.childNodes, s("text", { class: "said", x: -34, y: -24 }, a > 0.7 ? "Edits and repeated phrases: most guesses are right." : a > 0.35 ? "Open text: about every other guess." : speed < 1 ? "Too few: checking them costs more than it saves." : "Few guesses are right."));
  };
  const note = h("p", { class: "note" }, "Four draft tokens. Dashed: the textbook. Solid: with the times of forwards on this machine, and a drafter that takes a quarter of one.");
  return { svg: [holder, note], draw };
}

export function limits() {
  const { svg, draw } = picture();
  const temperature = slider("Temperature", { min: 0, max: 1.5, step: 0.1, value: 1.2, show: (x) => number(x, 1), changed: () => trial.start() });
  const count = slider("Draft tokens", { min: 1, max: 32, value: 16, changed: () => trial.start() });
  const trial = experiment("A race it may lose, on the live model", [temperature.field, count.field], async (show, signal) => {
    const drafter = getInfo()?.drafters.includes("token_recycling") ? "token_recycling" : "ngram";
    show(h("p", {}, "…"));
    const lanes = await collect({ messages: user("Invent ten unusual names for a ship."), lanes: [{ drafter: "none" }, { drafter, num_draft_tokens: count.value }], temperature: temperature.value, seed: 3, max_tokens: 64 }, signal);
    const [plain, fast] = lanes.map(({ end }) => end), times = raceSpeedup(lanes[1].steps, lanes[0].steps);
    show(h("p", {}, h("b", { class: times < 0.97 ? "bad" : "" }, `${number(times)}×`), ` with ${drafter.replaceAll("_", " ")}: ${fast.stats.accepted} of ${fast.stats.drafted} guesses right. `, times < 0.97 ? "Speculation costs you here." : times < 1.1 ? "No gain to speak of." : "It still pays."),
      h("p", { class: "note" }, plain.sha256 === fast.sha256 ? "The text is the same in any case." : "The texts differ."));
  });
  return part({
    count: "6 of 6", title: "When it does not help.", picture: svg, draw, experiment: trial.element,
    words: ["Guesses that are wrong are scored for nothing. At high temperature, or in text that repeats nothing, few are right. In large batches the processor is busy anyway, and extra tokens cost nearly what a step does. A very short reply is mostly reading the prompt.",
      "So a controller weighs what a node costs on this machine, as measured, against how often guesses have been right, and drafts less, or nothing, where it does not pay. The dials show its choices, and say when speculation is costing you."],
    question: { text: "Checking 4 guesses makes a step 1.6 times as long. When does speculation pay?", right: 2,
      answers: ["Always: it is one forward", "When all 4 are right", "When steps commit more than 1.6 tokens on average"],
      because: "A step that is 1.6 times as long must bring more than 1.6 times the tokens. One comes anyway, so 0.6 accepted guesses a step are break-even, and drafting itself must be paid for, too." },
  });
}
