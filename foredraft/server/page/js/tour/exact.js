// Part 4: why the text cannot change.
import { h, number, s, slider } from "../dom.js";
import { getInfo } from "../store.js";
import { collect, column, experiment, part, raise, scene, user } from "./part.js";

const WORDS = ["river", "sea", "road", "hill", "town"], LOG_P = [-0.9, -2.3, -1.3, -2.0, -2.5], NOISE = [0.2, 1.1, 1.6, -0.3, 0.9];

function picture() {
  const group = s("g", { class: "bars" }), base = 150, scale = 46;
  const rects = WORDS.map((_, i) => [s("rect", { class: "p", x: column(i) + 18, width: 34, rx: 3 }), s("rect", { class: "q", x: column(i) + 18, width: 34, rx: 3 }), s("rect", { class: "got", x: column(i) + 10, y: 24, width: 50, height: 168, rx: 8, opacity: 0 })]);
  group.append(...rects.flat());
  const labels = WORDS.map((text, i) => s("text", { x: column(i) + 35, y: 184, "text-anchor": "middle" }, text));
  const captions = [[0.35, "Log probabilities, by the model."], [0.65, "Noise (violet): fixed by seed, position and token."], [Infinity, "The largest sum is the token, drafted or not."]];
  const { svg, say } = scene({ label: "Log probability plus fixed noise; the largest sum is the token", viewBox: "0 -8 430 222", y: 10, captions }, group, labels);
  const best = 2, lift = (i) => (LOG_P[i] + 3) * scale * 0.8;
  const draw = (t) => {
    WORDS.forEach((_, i) => {
      const [p, q, got] = rects[i], noise = t > 0.35 ? Math.max(0, NOISE[i] + 0.4) * scale * 0.55 : 0;
      raise(p, base + 18, lift(i));
      raise(q, base + 16 - lift(i), noise);
      got.setAttribute("opacity", t > 0.65 && i === best ? 1 : 0);
    });
    say(t);
  };
  return { svg, draw };
}

export function exact() {
  const { svg, draw } = picture();
  const temperature = slider("Temperature", { min: 0, max: 1.2, step: 0.1, value: 0.7, show: (x) => number(x, 1), changed: () => trial.start() });
  const seed = slider("Seed", { min: 0, max: 99, value: 7, changed: () => trial.start() });
  const trial = experiment("Three drafters, the live model", [temperature.field, seed.field], async (show, signal) => {
    const served = getInfo()?.drafter, other = getInfo()?.drafters.find((name) => name !== "none" && name !== served);
    const drafters = ["none", other, served];
    const rows = drafters.map((name) => ({ name: h("b", {}, name === "none" ? "no drafter" : name), steps: h("span", {}, "…"), hash: h("span", { class: "mono note" }, "") }));
    show(h("div", { class: "rows" }, rows.map((row) => h("div", {}, row.name, " ", row.steps, h("br"), row.hash))));
    const lanes = await collect({ messages: user("Write two sentences about a lighthouse."), lanes: drafters.map((drafter) => ({ drafter })), temperature: temperature.value, seed: seed.value, max_tokens: 48 }, signal,
      (event, all) => { rows[event.lane].steps.textContent = `${all[event.lane].steps.length} forwards …`; });
    lanes.forEach(({ end }, i) => { rows[i].steps.textContent = `${end.stats.steps} forwards`; rows[i].hash.textContent = end.sha256; });
    const same = new Set(lanes.map(({ end }) => end.sha256)).size === 1;
    show(h("p", {}, h("b", {}, same ? "Three times the same text." : "The texts differ.")), h("p", { class: "note" }, `“${lanes[0].end.text}”`), h("div", { class: "rows" }, rows.map((row) => h("div", {}, row.name, " ", row.steps, h("br"), row.hash))));
  });
  return part({
    count: "4 of 6", title: "No drafter can change a single word.", picture: svg, draw, experiment: trial.element,
    words: ["Here the model does not roll dice as it goes. Each token at each position has noise of its own, a function of your seed and nothing else; the token with the largest log probability plus noise is said. That is a fair draw from the model.",
      "What is drafted takes no part in it. A guess is kept if it is that token, so the same seed gives the same text under every drafter, or none. You can check it by the hash."],
    question: { text: "A broken drafter guesses nothing but nonsense. What happens to the text?", right: 0,
      answers: ["Nothing; it only takes longer", "Some nonsense gets in", "It ends early"],
      because: "Every guess is refused, and each step commits the one token that the model says itself. That is plain decoding, plus the time that was spent on guessing." },
  });
}
