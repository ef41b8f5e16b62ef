// A drafted tree, left to right: what was accepted is drawn strong, the likeliest line on top. With `pick`, what became
// of it is not told yet, and a node can be chosen: pick(node) hears which; `picked` is drawn as chosen.
import { fill, percent, s, shown } from "./dom.js";
import { isCopy } from "./tokens.js";

const ROW = 46, GAP = 26, HEIGHT = 32;

export function treePicture(row, { pick = null, picked = null } = {}) {
  const { draft } = row, path = pick ? [] : row.path;
  const children = new Map([[-1, []]]);
  draft.parents.forEach((parent, node) => { children.set(node, []); children.get(parent).push(node); });
  const texts = draft.texts.map((text) => shown(text).slice(0, 14));
  const figures = draft.tokens.map((token, node) => said(row, token, node, !pick));
  const width = (node) => (node < 0 ? 34 : Math.max(48, 18 + 7.2 * texts[node].length, 14 + 5.3 * figures[node].length));
  const at = new Map();
  let line = 0;
  const place = (node, x) => {
    const here = { x, y: line };
    at.set(node, here);
    // The accepted child goes first, so that what became text is one straight line.
    const below = [...children.get(node)].sort((a, b) => path.includes(b) - path.includes(a) || a - b);
    below.forEach((child, i) => { if (i) line += 1; place(child, x + width(node) + GAP); });
  };
  place(-1, 1);
  const y = (node) => 2 + at.get(node).y * ROW;
  const right = Math.max(...[...at].map(([node, { x }]) => x + width(node))) + 2;
  const picture = s("svg", { class: "tree", viewBox: `0 0 ${right} ${(line + 1) * ROW}`, role: pick ? "group" : "img", "aria-label": pick ? `A draft of ${draft.tokens.length} tokens: choose one` : readAloud(row, texts) });
  picture.style.minWidth = `${right}px`;
  picture.style.maxWidth = `${right * 1.15}px`;
  draft.parents.forEach((parent, node) => {
    const from = at.get(parent).x + width(parent), to = at.get(node).x;
    const a = y(parent) + HEIGHT / 2, b = y(node) + HEIGHT / 2;
    picture.append(s("path", { class: path.includes(node) ? "yes" : "", d: `M${from} ${a} C${from + 14} ${a} ${to - 14} ${b} ${to} ${b}` }));
  });
  for (const [node, { x }] of at) {
    const kind = node < 0 ? "root" : `${node === picked ? "picked" : ""} ${path.includes(node) ? "yes" : ""} ${isCopy(row, node) ? "copy" : ""}`;
    const group = s("g", { class: `node ${kind}` }, s("rect", { x, y: y(node), width: width(node), height: HEIGHT }),
      s("text", { x: x + width(node) / 2, y: y(node) + (node < 0 ? 20 : 14), "text-anchor": "middle" }, node < 0 ? "…" : texts[node]));
    if (node >= 0) group.append(s("text", { class: "p", x: x + width(node) / 2, y: y(node) + 26, "text-anchor": "middle" }, figures[node]));
    if (pick && node >= 0) fill(group, { role: "button", tabindex: 0, "data-node": node, "aria-pressed": String(node === picked), "aria-label": lineTo(draft, node), onclick: () => pick(node),
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(node); } } }, []);
    picture.append(group);
  }
  return picture;
}

// The text from the root to a node.
function lineTo({ parents, texts }, node) {
  const line = [];
  for (let at = node; at >= 0; at = parents[at]) line.unshift(texts[at]);
  return line.join("");
}

function readAloud({ draft, path }, texts) {
  const named = (nodes) => (nodes.length ? nodes.map((node) => texts[node].trim()).join(", ") : "none");
  const others = draft.tokens.map((_, node) => node).filter((node) => !path.includes(node));
  return `A draft of ${draft.tokens.length} tokens. Accepted: ${named(path)}. The others: ${named(others)}.`;
}

// What the drafter gave a node, and what the model alone gives its token there; both given all that stands before it.
function said(row, token, node, hasTarget) {
  const guess = row.draft.draft_probs?.[node] ?? chance(row.draft, node);
  const law = row.why?.laws.find((found) => found.node === row.draft.parents[node]);
  const target = hasTarget ? law?.candidates.find((c) => c.token === token)?.model_prob : null;
  return [guess, target].filter((p) => p != null).map(percent).join(" → ");
}

// The drafter's estimate is for a node and all above it; this is for the node alone.
function chance({ chances, parents }, node) {
  const here = chances?.[node], above = parents[node] < 0 ? 1 : chances?.[parents[node]];
  return here == null || !above ? here : Math.min(1, here / above);
}
