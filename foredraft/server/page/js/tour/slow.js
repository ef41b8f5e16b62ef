// Part 1: decoding is slow because all weights are read for each token.
import { h, number, scrub } from "../dom.js";
import { forwardMs } from "../api.js";
import { Bars, keys } from "../bars.js";
import { Frame, ticks } from "../charts.js";
import { getInfo } from "../store.js";
import { msOf } from "../theory.js";
import { compare, part } from "./part.js";

const MOST = 10, times = (x) => `${number(x, 1)}×`;

export function slow() {
  const bars = new Bars("How long a forward takes", ["1 token", "8 tokens"], MOST, { show: times, moved: (_, to) => guess(to) });
  bars.set(0, "p", 1);
  bars.set(1, "q", 4, "?");
  bars.draggable(1, "q", 4);
  const said = scrub("How many times as long a forward of eight tokens takes", { min: 1, max: MOST, step: 0.1, value: 4, show: times, blank: true, moved: (to) => guess(to) });
  const curveAt = h("div", {}), names = h("div", {}, keys(["q", "your guess: drag the bar"]));
  const measured = new Map();
  const one = getInfo() ? msOf(getInfo().curve, 1) : 0;
  let isOver = false;

  function guess(to) {
    if (isOver) return;
    const is = Math.max(1, Math.round(to * 10) / 10);
    said.set(is);
    bars.set(1, "q", is);
    bars.columns[1].say(is);
    it.guessed();
  }

  // The shortest of three: whatever else the machine does only ever adds.
  async function measure(...sizes) {
    for (const n of sizes) measured.set(n, Math.min(await forwardMs(n), await forwardMs(n), await forwardMs(n)));
    const points = [...measured].sort((a, b) => a[0] - b[0]), most = Math.max(...points.map(([, ms]) => ms));
    const frame = new Frame(380, 110, [0, 32], [0, most * 1.15], `Milliseconds of a forward by its tokens: ${points.map(([n, ms]) => `${n}: ${number(ms, 1)}`).join(", ")}`);
    frame.axes(ticks([1, 8, 16, 24, 32]), ticks([Math.round(most)]), "tokens in one forward", "ms").line(points, "machine");
    points.forEach(([n, ms]) => frame.dot(n, ms));
    curveAt.replaceChildren(frame.svg);
  }

  const it = part({
    key: "slow",
    title: "How long does it take to read eight tokens at once?",
    ask: [h("p", {}, "A language model writes in small pieces, words or parts of words. They are called ", h("em", {}, "tokens"), ". For each one it goes through all of its numbers, its weights, from first to last: that is a ", h("em", {}, "forward"), `. ${getInfo()?.recorded ? `On ${getInfo().cpu}` : "Here, on this machine"}, a forward that reads one token takes ${number(one, 1)} ms.`),
      h("p", {}, "And one that reads eight tokens at once? I say ", said.element, " as long.")],
    figure: [bars.element, names, curveAt],
    answer: async (show, _, isGuessed) => {
      isOver = true;
      bars.fix();
      await measure(1, 8);
      const [short, long] = [measured.get(1), measured.get(8)], found = long / short;
      bars.set(1, "out", found);
      names.replaceChildren(keys(["q", "your guess"], ["out", "measured now"]));
      const cost = h("b", {}), each = h("b", {});
      const tell = (n) => { cost.textContent = `${number(measured.get(n), 1)} ms`; each.textContent = `${number(measured.get(n) / n, 1)} ms`; };
      const size = scrub("Tokens in one forward", { min: 1, max: 32, value: 8, changed: async (n) => { if (!measured.has(n)) await measure(n); tell(n); } });
      tell(8);
      const bytes = getInfo()?.read_bytes;
      const speed = bytes ? `Its weights are ${number(bytes / 1e6, 0)} MB: the forward of one token reads ${number(bytes / short / 1e6, 1)} GB a second. ` : "";
      const outcome = [times(said.value), times(found), Math.abs(found - said.value) < 0.5];
      show(compare(isGuessed, ...outcome),
        h("p", {}, found < 7 ? "Eight times the tokens take less than eight times the time: the weights are fetched from memory once for all eight, and fetching takes longer than the arithmetic. " : "Nearly eight times as long: here the arithmetic takes the time, and guessing ahead will gain little. On other machines the weights' way from memory takes it, once for all eight. ", speed, "A forward of ", size.element, " tokens takes ", cost, " here, ", each, " for each of them."),
        h("p", {}, "So the model could write several tokens in little more than the time of one, if only it knew them beforehand. But the second is not known before the first is chosen."));
      return outcome;
    },
    name: "Measure it",
  });
  return it;
}
