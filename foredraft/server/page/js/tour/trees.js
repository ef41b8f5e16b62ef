// Part 6: guesses may branch. The reader says which branch the model takes.
import { h, scrub, shown } from "../dom.js";
import { treePicture } from "../tree.js";
import { asked, collect, part, spoken } from "./part.js";

export function trees() {
  const at = h("div", { class: "tree-scroll", tabindex: 0, role: "region", "aria-label": "A drafted tree" }, h("p", { class: "note" }, "A draft is being made …"));
  const before = h("p", { class: "before" }), facts = h("p", { class: "note" });
  const drafter = asked("trees").lanes[0].drafter;
  let steps = [], index = 0, picked = null, found = null;

  async function load(signal) {
    const [lane] = await (found ??= collect(asked("trees"), signal));
    let text = "";
    for (const { row } of lane.steps) {
      if (row.draft.tokens.length > 1) steps.push({ row, text });
      text += row.committed.map((token) => token.text).join("");
    }
    if (!steps.length) throw new Error("This run drafted no trees.");
    // One to begin with: it branches, reaches some way, and part of it stands.
    const branches = ({ row }) => row.draft.tokens.length - new Set(row.draft.parents).size;
    const worth = (step) => 2 * Math.min(2, step.row.num_accepted) + 3 * Math.min(2, branches(step)) + Math.min(8, step.row.draft.tokens.length) / 2;
    index = steps.indexOf(steps.reduce((a, b) => (worth(b) > worth(a) ? b : a)));
  }

  async function ready() {
    await load();
    look({ isHidden: true });
  }

  function look({ isHidden }) {
    const { row, text } = steps[index];
    before.replaceChildren("“… ", text.slice(-60).replace(/^\S*\s/, ""), h("b", {}, " ▸"));
    at.replaceChildren(treePicture(row, isHidden ? { picked, pick: (node) => { picked = node; it.guessed(); look({ isHidden: true }); focusNode(node); } } : { picked }));
    const knows = row.draft.chances || row.draft.draft_probs;
    facts.textContent = isHidden ? (knows ? "Percentages: how likely the drafter holds each token, after what stands to its left." : "") : `Percentages: ${knows ? "what the drafter thought → " : ""}what the model gives it.${picked === null ? "" : " Your pick has the dashed frame."}`;
  }

  const focusNode = (node) => at.querySelector(`[data-node="${node}"]`)?.focus();

  const it = part({
    key: "trees",
    title: "Where it is unsure, a drafter may guess twice. Which branch will stand?",
    ask: [h("p", {}, "This is a real draft of “", spoken(drafter), drafter === "blend" ? "”: a small layer trained on what the model was thinking, together with copies from the text." : "”.", " Where it is unsure it branches: the draft is a ", h("em", {}, "tree"), ". One forward looks at all of it, and each token sees only those to its left on its own branch."),
      h("p", {}, "Pick the last token that you think the model will agree with.")],
    figure: [before, at, facts],
    ready,
    answer: async (show, signal, isGuessed) => {
      if (!steps.length) await load(signal);
      look({ isHidden: false });
      const { row } = steps[index], last = row.path.at(-1) ?? null;
      const name = (node) => (node === null ? "none of them" : `“${shown(row.draft.texts[node]).trim()}”`);
      const step = scrub("Step", { min: 1, max: steps.length, value: index + 1, moved: (n) => { index = n - 1; picked = null; look({ isHidden: false }); tell(); } });
      const result = h("span", {});
      const tell = () => { const now = steps[index].row; result.textContent = `${now.num_accepted} of ${now.draft.tokens.length} guesses stood, and the model's own “${shown(now.committed.at(-1).text).trim()}” followed.`; };
      tell();
      show(h("p", {}, isGuessed ? ["You picked ", h("b", { class: "said" }, name(picked)), "; the model went as far as "] : "The model went as far as ", h("b", {}, name(last)), picked === last && isGuessed ? ". Well guessed." : "."),
        h("p", {}, "At most one branch can stand, so of twelve guesses in a tree four tokens deep, four can be right at best. The others are insurance, and each costs a little time; a branch grows only where it is likely enough to pay."),
        h("p", {}, "In draft ", step.element, ` of ${steps.length}, `, result));
      return [name(picked), name(last), picked === last];
    },
    name: "See what stood",
  });
  return it;
}
