// Part 5: heads and trees.
import { h, number, s, shown, slider } from "../dom.js";
import { getInfo } from "../store.js";
import { treePicture } from "../tree.js";
import { collect, experiment, part, scene, user } from "./part.js";

const NODES = [["by", 0, 90, -1, 1], ["the", 1, 60, 0, 1], ["a", 1, 130, 0, 0], ["river", 2, 30, 1, 0], ["road", 2, 90, 1, 1], ["stream", 2, 150, 2, 0], ["bend", 3, 90, 4, 1], ["near", 0, 190, -1, 0]];

function picture() {
  const x = (depth) => 70 + depth * 98;
  const lines = NODES.map(([, depth, y, parent, yes]) => s("path", { class: yes ? "yes" : "", d: parent < 0 ? `M48 110 C60 110 58 ${y} ${x(depth)} ${y}` : `M${x(NODES[parent][1]) + 64} ${NODES[parent][2]} C${x(depth) - 18} ${NODES[parent][2]} ${x(depth) - 18} ${y} ${x(depth)} ${y}` }));
  const boxes = NODES.map(([text, depth, y]) => s("g", { class: "node" }, s("rect", { x: x(depth), y: y - 15, width: 64, height: 30 }), s("text", { x: x(depth) + 32, y: y + 5, "text-anchor": "middle" }, text)));
  const captions = [[0.55, "Where it is unsure, a draft may branch."], [0.72, "One forward scores every branch."], [Infinity, "One path survives: four tokens."]];
  const { svg, say } = scene({ label: "A tree of guesses; one path of it is accepted", class: "tree", viewBox: "0 -10 440 230", y: 6, captions }, lines, boxes, s("text", { x: 0, y: 114 }, "stands"));
  const draw = (t) => {
    NODES.forEach(([, depth, , , yes], i) => {
      const isThere = t > 0.08 + 0.13 * depth, isJudged = t > 0.72;
      lines[i].setAttribute("class", isJudged && yes ? "yes" : ""); lines[i].setAttribute("opacity", isThere ? 1 : 0);
      boxes[i].setAttribute("class", `node ${isJudged && yes ? "yes" : ""}`); boxes[i].setAttribute("opacity", isThere ? (isJudged && !yes ? 0.4 : 1) : 0);
    });
    say(t);
  };
  return { svg, draw };
}

export function trees() {
  const { svg, draw } = picture();
  const temperature = slider("Temperature", { min: 0, max: 1.2, step: 0.1, value: 0, show: (x) => number(x, 1), changed: () => trial.start() });
  const trial = experiment("Trees of the live model", temperature.field, async (show, signal) => {
    const [lane] = await collect({ messages: user("Explain in two sentences how a mill grinds grain."), lanes: [{ drafter: getInfo()?.drafter }], temperature: temperature.value, max_tokens: 48 }, signal);
    const steps = lane.steps.filter((step) => step.row.draft.tokens.length > 1);
    if (!steps.length) { show(h("p", {}, "This run drafted no trees.")); return; }
    const best = steps.reduce((a, b) => (b.row.num_accepted > a.row.num_accepted ? b : a));
    const at = h("div", { class: "tree-scroll", tabindex: 0, role: "region", "aria-label": "A drafted tree" }), facts = h("p", {});
    const pick = slider("Step", { min: 1, max: steps.length, value: steps.indexOf(best) + 1, moved: (n) => look(n) });
    const look = (n) => {
      const { row } = steps[n - 1];
      at.replaceChildren(treePicture(row));
      facts.replaceChildren(h("b", {}, `${row.num_accepted} of ${row.draft.tokens.length}`), ` nodes accepted by ${getInfo()?.drafter}; then the model’s own “${shown(row.committed.at(-1).text).trim()}”.`);
    };
    look(pick.value);
    show(facts, pick.field, at, h("p", { class: "note" }, "Small figures: what the drafter thought of a guess → what the model gives it."));
  });
  return part({
    count: "5 of 6", title: "Heads guess from what the model was thinking, and guesses may branch.", picture: svg, draw, experiment: trial.element,
    words: ["A copy helps where text repeats itself. For the rest there are heads: a small trained layer on the model's own hidden state, which already knows a good deal about the words to come.",
      "Where a head is unsure, it proposes more than one continuation. A mask lets each node see its own ancestors alone, so one forward scores all branches, and the model walks down the one that it agrees with. Nodes cost time, so a tree grows only where a node is likely enough to be worth it."],
    question: { text: "A tree has 12 nodes and is 4 deep. How many of its tokens can one step accept at most?", right: 0,
      answers: ["4", "12", "5"],
      because: "Accepted tokens form one path, so at most as many as the tree is deep; and one more comes from the model itself, as in every step. The other nodes were insurance." },
  });
}
