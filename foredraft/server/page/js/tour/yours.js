// Part 8: the reader's own prompt, and a picture to show to others.
import { h, number, scrub } from "../dom.js";
import { sharing } from "../share.js";
import { raceSpeedup, record, recordPlain } from "../store.js";
import { MadeText } from "../text.js";
import { ASKED } from "./asked.js";
import { asked, collect, compare, part, values } from "./part.js";

const times = (x) => `${number(x, 2)}×`;

export function yours() {
  const prompt = h("textarea", { rows: 3, maxlength: 20000, "aria-label": "Your prompt", placeholder: "Your own question or task", oninput: () => ready() });
  const few = values("yours", "prompt")?.map((text) => h("button", { class: "chip", type: "button", onclick: () => { prompt.value = text; ready(); } }, text.slice(0, 44)));
  if (few) prompt.readOnly = true;
  const said = scrub("Speed-up", { min: 0.5, max: 4, step: 0.05, value: 1.5, show: times, blank: true, moved: () => { isMoved = true; ready(); } });
  const figure = h("div", { class: "yours" }, h("p", { class: "made note" }, "Your text will be written here."));
  let isMoved = false;
  const ready = () => { if (isMoved && prompt.value.trim()) it.guessed(); };
  const it = part({
    key: "yours",
    title: "Now yours: what will it bring for your own words?",
    ask: [h("p", {}, "Give the model something to do. It will write it twice, at temperature 0: plainly, and as this server does it."), few ? h("div", { class: "answers" }, few) : null, prompt,
      h("p", {}, "It will come ", said.element, " as fast.")],
    figure,
    answer: async (show, signal, isGuessed) => {
      const text = prompt.value.trim() || ASKED.yours.recorded.prompt[0];
      prompt.value = text;
      const made = new MadeText({ label: "Your text; arrow keys choose a token, Enter asks why" });
      const lines = h("p", { class: "note", role: "status" }, "Both are running, in turns …");
      figure.replaceChildren(made.element, lines);
      const lanes = await collect(asked("yours", { prompt: text }), signal, (event) => {
        if (event.lane === 0) { recordPlain(event); return null; }
        record(event);
        return made.play(event, 30);
      });
      made.end();
      const [plain, fast] = lanes, found = raceSpeedup(fast.steps, plain.steps);
      lines.replaceWith(sharing({ plain: plain.end, fast: fast.end, speedup: found, prompt: text, temperature: 0 }));
      const outcome = [times(said.value), times(found), Math.abs(found - said.value) < 0.15];
      show(compare(isGuessed, ...outcome),
        h("p", {}, found < 1.05 ? "No gain here: the text is short, or nobody could foresee it. The server noticed, and guessed less." : "The same text, sooner. Click a word of it to see how it came to be there.", " Beside it is a picture to show to others: both hashes, the gain, and the machine that it was measured on."));
      return outcome;
    },
    name: "Write it",
  });
  return it;
}
