// Part 2: draft and verify.
import { h, number, scrub } from "../dom.js";
import { MadeText } from "../text.js";
import { origin } from "../tokens.js";
import { asked, collect, compare, part, served, spoken, values } from "./part.js";

const PLAYED_MS = 110;

export function verify() {
  const strip = h("div", { class: "strip", role: "img", "aria-label": "One column for each forward; nothing has run yet" });
  const textAt = h("div", { class: "made-at" }, h("p", { class: "made note" }, "The model's text will be written here. Grey words ahead of the cursor are guesses."));
  const said = scrub("Tokens a forward", { min: 1, max: 5, step: 0.1, value: 2, show: (x) => number(x, 1), blank: true, moved: () => it.guessed() });
  let most = 4;

  function add(event) {
    const { row } = event;
    if (!row.committed.length) return;
    const refused = row.draft.tokens.length - row.num_accepted;
    strip.append(h("span", {}, row.committed.map((_, i) => h("i", { "data-by": origin(row, i).by })), refused ? h("i", { "data-by": "refused" }) : null));
  }

  const it = part({
    key: "verify",
    title: "How many tokens can one forward write?",
    ask: [h("p", {}, "So somebody has to guess: a ", h("em", {}, "drafter"), ", small and quick, that proposes the next few tokens, a ", h("em", {}, "draft"), ". One forward of the model then looks at all of them. Guesses that are what the model writes itself stand; at the first that is not, the model writes its own token, and the rest of the draft is thrown away."),
      h("p", {}, "The model is asked to rename a variable in a piece of code. Its drafter may guess four tokens ahead. On average a forward will write ", said.element, " tokens; without a drafter it is 1.")],
    figure: [textAt, strip],
    answer: async (show, signal, isGuessed) => {
      const made = new MadeText({ label: "The model's text; arrow keys choose a token, Enter asks why" });
      textAt.replaceChildren(made.element);
      strip.replaceChildren();
      const [lane] = await collect(asked("verify", { num_draft_tokens: most }), signal, async (event) => {
        await made.play(event, PLAYED_MS);
        add(event);
        made.element.scrollTop = made.element.scrollHeight;
      });
      made.end();
      const { stats } = lane.end, found = stats.committed / stats.steps;
      strip.setAttribute("aria-label", `${stats.steps} forwards wrote ${stats.committed} tokens`);
      const size = scrub("Draft tokens", { min: 0, max: 16, value: most, values: values("verify", "num_draft_tokens"), changed: (n) => { most = n; it.start(); } });
      const outcome = [number(said.value, 1), `${number(found)} tokens a forward`, Math.abs(found - said.value) < 0.3];
      show(compare(isGuessed, ...outcome),
        h("p", {}, `${stats.committed} tokens in `, h("b", {}, `${stats.steps} forwards`), `; of ${stats.drafted} guesses of the drafter “${spoken(served())}”, ${stats.accepted} stood. Each column beside is a forward: green are guesses that stood, and the rest are the model's own. Click a word of the text to see its test.`),
        h("p", {}, "Of five guesses with a wrong third one, two stand, and the model's own token takes the third place: three tokens. A drafter that is always wrong still leaves one a forward. It costs time, and never stops the text."),
        h("p", {}, "Let it guess ", size.element, " tokens ahead."));
      return outcome;
    },
  });
  return it;
}
