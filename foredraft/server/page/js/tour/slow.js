// Part 1: decoding is slow because all weights are read for each token.
import { h, number, percent, s, slider } from "../dom.js";
import { forwardMs } from "../api.js";
import { Frame, ticks } from "../charts.js";
import { experiment, part } from "./part.js";

const COLUMNS = 24, ROWS = 12, WORDS = ["The", " old", " mill", " stands", " by", " the", " river"];

function picture() {
  const cells = Array.from({ length: COLUMNS * ROWS }, (_, i) => s("rect", { x: (i % COLUMNS) * 18, y: Math.floor(i / COLUMNS) * 15, width: 15, height: 12, rx: 2.5 }));
  const said = s("text", { class: "said", x: 0, y: 224 }), count = s("text", { x: 0, y: 248 });
  const svg = s("svg", { viewBox: "0 0 430 256", role: "img", "aria-label": "All weights are read once for each word" }, s("g", { class: "weights" }, cells), said, count);
  const draw = (progress) => {
    const done = progress * (WORDS.length - 1), sweep = (done % 1) * cells.length;
    const isOver = progress >= 1;
    cells.forEach((cell, i) => cell.classList.toggle("read", !isOver && i <= sweep && i > sweep - 40));
    said.textContent = WORDS.slice(0, Math.floor(done) + 1).join("");
    count.textContent = `${Math.floor(done) + 1} words, the weights read ${Math.floor(done) + 1} times`;
  };
  return { svg, draw };
}

export function slow() {
  const { svg, draw } = picture();
  const size = slider("Tokens in one forward", { min: 1, max: 32, value: 8, changed: () => trial.start() });
  const measured = new Map();
  const trial = experiment("On this machine, now", size.field, async (show) => {
    // The shorter of two: whatever else the machine does only ever adds.
    for (const n of [1, size.value]) measured.set(n, Math.min(await forwardMs(n), await forwardMs(n)));
    const one = measured.get(1), many = measured.get(size.value);
    const points = [...measured].sort((a, b) => a[0] - b[0]);
    const frame = new Frame(380, 110, [0, 32], [0, Math.max(...points.map(([, ms]) => ms)) * 1.15], "Milliseconds of a forward by its tokens");
    frame.axes(ticks([1, 8, 16, 24, 32]), ticks([Math.round(frame.ys[1] / 1.15)], (v) => `${v}`), "tokens in one forward", "ms").line(points, "machine");
    points.forEach(([n, ms]) => frame.dot(n, ms));
    show(h("p", {}, `One token: ${number(one, 1)} ms. `, h("b", {}, `${size.value} at once: ${number(many, 1)} ms`), size.value > 1 ? `, ${percent(many / size.value / one)} of the time for each one.` : "."), frame.svg);
  }, "Measure");
  return part({
    count: "1 of 6", title: "A model reads all of itself for every word.", picture: svg, draw, experiment: trial.element,
    words: ["To say one token, a model multiplies with each of its weights once. Fetching them from memory takes far longer than the arithmetic; the processor mostly waits.",
      "While a weight is there, it could be multiplied with several tokens for nearly nothing. But the second token is not known before the first is chosen. So everything is fetched again."],
    question: { text: "Why is scoring 8 tokens in one forward not 8 times as slow as scoring one?", right: 1,
      answers: ["The model skips most layers", "The weights are fetched once for all 8", "Short tokens are cheaper"],
      because: "The weights are what takes the time, and one forward fetches them once, however many tokens it multiplies them with. At some number of tokens arithmetic takes over and the curve rises: move the slider to see where." },
  });
}
