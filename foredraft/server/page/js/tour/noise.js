// Part 4: p, q and the noise of one token, as they are, at every temperature.
import { h, number, percent, scrub, shown } from "../dom.js";
import { keys } from "../bars.js";
import { answers, asked, part, spoken, values } from "./part.js";
import { BEGIN, draftAt, lawAt, likeliest } from "./token.js";

const LOUD = 6, ROWS = 6;
const word = (text) => shown(text).trim();
const signed = (x) => `${x < 0 ? "−" : ""}${number(Math.abs(x), 1)}`;

export function noise() {
  const figure = h("div", { class: "rows noises" }), names = h("div", {}), choiceAt = h("div", {}, h("p", { class: "note" }, "…"));
  const drafter = asked("draft").lanes[0].drafter;
  let words = null, said = null, at = 0.8, seed = 8;
  const laws = new Map(), drafts = new Map();

  async function ready() {
    words ??= (await likeliest()).slice(0, 4).map(([text]) => text);
    choiceAt.replaceChildren(answers("The next word", [...words, "another"], (i) => { said = [...words, "another"][i]; it.guessed(); }));
    draw(await law(), false);
  }

  async function law(signal) {
    const key = `${at}/${seed}`;
    if (!laws.has(key)) laws.set(key, await lawAt(at, seed, signal));
    return laws.get(key);
  }

  // The rows of a law: p, q and noise as bars, and their sum.
  function draw({ candidates, taken }, hasNoise) {
    const q = drafts.get(at)?.probs;
    const sum = (c) => Math.log(c.target_prob) + c.noise;
    const found = candidates.filter((c) => c.target_prob > 0).sort(hasNoise ? (a, b) => sum(b) - sum(a) : (a, b) => b.target_prob - a.target_prob).slice(0, ROWS);
    figure.replaceChildren(...found.map((c) => h("div", { class: `noise-row ${hasNoise && c.token === taken.token ? "taken" : ""}` },
      h("span", { class: "name" }, word(c.text)),
      h("span", { class: "two" }, h("i", { class: "p", vars: { "--of": c.target_prob } }), hasNoise && q?.get(c.token) != null ? h("i", { class: "q", vars: { "--of": q.get(c.token) } }) : null),
      h("span", { class: "figures" }, percent(c.target_prob), hasNoise && q?.get(c.token) != null ? h("small", {}, percent(q.get(c.token))) : null),
      hasNoise ? [h("span", { class: `swing ${c.noise < 0 ? "below" : ""}` }, h("i", { vars: { "--of": Math.min(1, Math.abs(c.noise) / LOUD) } })),
        h("span", { class: "figures" }, `${signed(Math.log(c.target_prob))} ${c.noise < 0 ? "−" : "+"} ${number(Math.abs(c.noise), 1)} = `, h("b", {}, signed(sum(c))))] : null)));
    names.replaceChildren(keys(["p", "p, by the model"], ...(hasNoise ? [...(q ? [["q", `q, by the drafter “${spoken(drafter)}”`]] : []), ["swing", "noise, by the seed"]] : [])));
  }

  const written = h("b", {}), favourite = h("span", {});
  async function again(signal) {
    const found = await law(signal);
    if (!drafts.has(at)) drafts.set(at, await draftAt(at, signal).catch(() => null));
    draw(found, true);
    written.textContent = `“${word(found.taken.text)}”`;
    const best = drafts.get(at)?.best;
    favourite.textContent = best ? ` Its own favourite was “${word(best.text)}”, with q ${percent(best.draft_prob)}; the model gives that ${percent(best.target_prob)}.` : "";
    return found;
  }

  const it = part({
    key: "noise",
    title: "The model rolls dice. Which word will it write?",
    ask: [h("p", {}, "How bold a text is, is set by its ", h("em", {}, "temperature"), ": at 0 the model always writes the likeliest token; above, chance has a say. Here are the real probabilities p, at temperature 0.8, of what may follow ", h("b", {}, `“${BEGIN} …”`)),
      h("p", {}, "Its dice are set by a number, the ", h("em", {}, "seed"), ". With seed 8 the next word is:"), choiceAt],
    figure: [figure, names],
    ready,
    answer: async (show, signal, isGuessed) => {
      const found = await again(signal), is = word(found.taken.text);
      const heat = scrub("Temperature", { min: 0.1, max: 1.2, step: 0.1, value: at, values: values("law", "temperature"), show: (x) => number(x, 1), moved: (x) => { at = x; again(signal).catch(() => {}); } });
      const dice = scrub("Seed", { min: 0, max: 99, value: seed, values: values("law", "seed"), moved: (x) => { seed = x; again(signal).catch(() => {}); } });
      show(h("p", {}, isGuessed ? ["You said ", h("b", { class: "said" }, said === "another" ? "another" : `“${said}”`), "; it is ", h("b", {}, `“${is}”`), said === is || (said === "another" && !words.includes(is)) ? ". Well guessed." : "."] : ["It is ", h("b", {}, `“${is}”`), "."]),
        h("p", {}, "These dice were thrown beforehand. Each token at each place has a ", h("em", {}, "noise"), " of its own, made of the seed, the place and the token, and of nothing else. It is added to the logarithm of p, and the largest sum is written. (That is a fair draw: the noise has just the right distribution, Gumbel's.)"),
        h("p", {}, "At temperature ", heat.element, " and with seed ", dice.element, " the model writes ", written, ". The bars are p, and q, what the drafter thought; q has no part in the sum.", favourite));
      return [`“${said}”`, `“${is}”`, said === is || (said === "another" && !words.includes(is))];
    },
  });
  return it;
}
