// Part 5: no drafter can change the text.
import { h, number, scrub } from "../dom.js";
import { answers, asked, collect, part, spoken, values } from "./part.js";

export function exact() {
  const drafters = [...new Set(asked("exact").lanes.map(({ drafter }) => drafter))];
  const rows = drafters.map((name) => ({ steps: h("span", { class: "note" }), text: h("p", { class: "lane-text" }), hash: h("p", { class: "mono note" }), name }));
  const figure = h("div", { class: "writers" }, rows.map((row) => h("article", {}, h("h3", {}, row.name === "none" ? "no drafter" : spoken(row.name), " ", row.steps), row.text, row.hash)));
  let said = 0, at = 0.7, seed = 7;
  const it = part({
    key: "exact",
    title: "Three drafters, one seed. How many different texts?",
    ask: [h("p", {}, `The model writes two sentences about a lighthouse, three times, at temperature 0.7 and with seed 7. Once without a drafter, once with “${spoken(drafters[1])}”, which is often wrong`, drafters[2] ? [`, and once with “${spoken(drafters[2])}”, which is often right`] : null, "."),
      h("p", {}, "How many different texts will there be?"),
      answers("How many texts", ["One", "Two", "Three"], (i) => { said = i + 1; it.guessed(); })],
    figure,
    answer: async (show, signal, isGuessed) => {
      rows.forEach((row) => { row.steps.textContent = "…"; row.text.textContent = row.hash.textContent = ""; });
      const lanes = await collect({ ...asked("exact", { temperature: at, seed }), lanes: drafters.map((drafter) => ({ drafter })) }, signal, (event, all) => {
        const row = rows[event.lane];
        row.text.textContent += event.row.committed.map((token) => token.text).join("");
        row.steps.textContent = `${all[event.lane].steps.length} forwards`;
      });
      lanes.forEach(({ end }, i) => { rows[i].steps.textContent = `${end.stats.steps} forwards, ${end.stats.accepted} of ${end.stats.drafted} guesses stood`; rows[i].hash.textContent = `SHA-256 ${end.sha256.slice(0, 24)}…`; });
      const count = new Set(lanes.map(({ end }) => end.sha256)).size;
      const heat = scrub("Temperature", { min: 0, max: 1.2, step: 0.1, value: at, values: values("exact", "temperature"), show: (x) => number(x, 1), changed: (x) => { at = x; it.start(); } });
      const dice = scrub("Seed", { min: 0, max: 99, value: seed, values: values("exact", "seed"), changed: (x) => { seed = x; it.start(); } });
      show(h("p", {}, isGuessed ? ["You said ", h("b", { class: "said" }, said), "; there ", count === 1 ? "is " : "are "] : ["There ", count === 1 ? "is " : "are "], h("b", {}, count === 1 ? "one text" : `${count} texts`), isGuessed && said === count ? ". Well guessed." : "."),
        h("p", {}, "A guess stands if it is the token that the model, its temperature and its noise choose anyway. So a drafter can make the text come sooner or later, and nothing else. The line of digits under each text is its hash: had a single letter changed, it would be another."),
        h("p", {}, "It is so at temperature ", heat.element, " and with seed ", dice.element, ", and at any other: bit for bit with this project's kernels on a CPU; elsewhere two words that are almost equally likely may change places."));
      return [said, count === 1 ? "one text" : `${count} texts`, said === count];
    },
    name: "Let them write",
  });
  return it;
}
