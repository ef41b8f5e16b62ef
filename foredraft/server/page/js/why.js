// Why this token? The draft, what the target thought, the test with its numbers, the residual.
import { clear, fill, h, number, percent, shown } from "./dom.js";
import { treePicture } from "./tree.js";
import { isCopy, MEANING, origin } from "./tokens.js";

const panel = document.getElementById("why");
let before = null, moveBy = null;

export function closeWhy() {
  if (panel.hidden) return;
  panel.hidden = true;
  document.body.classList.remove("asking");
  document.querySelectorAll(".token.picked").forEach((token) => token.classList.remove("picked"));
  before?.focus?.({ preventScroll: true });
}

// Explain one committed token of a step; `move(by)` goes to its neighbours.
export function openWhy(event, index, { step, move }) {
  const { row } = event;
  if (panel.hidden) before = document.activeElement;
  const focused = panel.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  moveBy = move;
  const { by, author } = origin(row, index);
  const committed = row.committed[index];
  const node = index === 0 ? -1 : row.path[index - 1];
  const law = row.why?.laws.find((found) => found.node === node);
  fill(clear(panel), {}, [
    header(committed, by, author, row.position + index, step, move),
    h("p", { class: "say" }, ...sentence(row, index, by, law)),
    row.draft.tokens.length ? draftSection(row) : null,
    law ? targetSection(law, row) : null,
    testSection(row, index, law),
    residualSection(row, index, by, law),
    timesSection(event),
  ]);
  panel.hidden = false;
  panel.scrollTop = 0;
  document.body.classList.add("asking");
  if (focused) ([...panel.querySelectorAll("button")].find((button) => button.getAttribute("aria-label") === focused) ?? panel).focus();
}

// For who came by the keyboard; Escape goes back to where they were.
export const focusWhy = () => panel.focus({ preventScroll: true });

function header(committed, by, author, position, step, move) {
  const kind = author === "copy" ? "copy" : by;
  return h("div", { class: "head" },
    h("div", {}, h("p", { class: "word" }, `“${committed.text.trim() || shown(committed.text)}”`),
      h("p", { class: `kind ${kind}` }, MEANING[kind]),
      h("p", { class: "note" }, `step ${step}, position ${position}`)),
    h("nav", {},
      h("button", { class: "icon-button", type: "button", "aria-label": "Token before", onclick: () => move(-1) }, "←"),
      h("button", { class: "icon-button", type: "button", "aria-label": "Token after", onclick: () => move(1) }, "→"),
      h("button", { class: "icon-button", type: "button", "aria-label": "Close", onclick: closeWhy }, "✕")));
}

const quoted = (text) => h("b", {}, `“${text.trim() || shown(text)}”`);

function sentence(row, index, by, law) {
  const word = quoted(row.committed[index].text);
  const prob = law?.candidates.find((c) => c.token === row.committed[index].token)?.model_prob;
  const odds = prob == null ? "" : ` (${percent(prob)} by the model alone)`;
  const rejected = index < row.draft.tokens.length ? rivals(row, index) : [];
  switch (by) {
    case "draft": return row.why?.rule === "target-only"
      ? ["The drafter had guessed ", word, ". In the same forward the target drew its own token here", odds, ", and it was the same: nothing had to be computed again."]
      : ["The drafter had drawn ", word, ", and the ratio test accepted it", odds, "."];
    case "correction": return ["The draft offered ", ...list(rejected), row.why?.rule === "target-only" ? ". The target drew " : ". The target refused, and what replaced it was drawn from the residual: ", word, odds,
      row.why?.rule === "target-only" ? ". Plain decoding would have written just this." : ". With this test the text is a draw from the model's own distribution, though not the one that plain decoding makes of the seed."];
    case "bonus": return ["Everything drafted up to here was right, and the forward that checked it already knew what follows: ", word, odds, ". It came for free."];
    default: return ["Nothing was drafted here, so this was a plain step: one forward, one token."];
  }
}

function rivals(row, index) {
  const parent = index === 0 ? -1 : row.path[index - 1];
  return row.draft.parents.flatMap((p, node) => (p === parent ? [row.draft.texts[node]] : []));
}

function list(texts) {
  const few = texts.slice(0, 3).flatMap((text, i) => [i ? ", " : "", quoted(text)]);
  return texts.length > 3 ? [...few, ` and ${texts.length - 3} more`] : few;
}

function draftSection(row) {
  const said = row.draft.draft_probs ? "drafted with → " : row.draft.chances ? "drafter's estimate → " : "";
  const count = row.draft.tokens.length, beside = count - row.budget;
  const budget = beside > 0 ? `, ${beside} of them copies beyond the ${row.budget} allowed` : ` of ${row.budget} allowed`;
  return h("section", {}, h("h3", {}, `The draft: ${count} ${count === 1 ? "token" : "tokens"}${budget}, ${row.num_accepted} accepted`),
    h("div", { class: "tree-scroll", tabindex: 0, role: "region", "aria-label": "The drafted tree" }, treePicture(row)),
    h("p", { class: "note" }, `Drafted by ${row.drafter.replaceAll("_", " ")}. Small figures: ${said}the model's own probability, after what stands to the left.`, row.draft.tokens.some((_, node) => isCopy(row, node)) ? " Dashed: copied from earlier text." : ""));
}

function targetSection(law, row) {
  const drafted = new Set(row.draft.tokens.filter((_, node) => row.draft.parents[node] === law.node));
  const hasDraft = law.candidates.some((c) => c.draft_prob != null);
  const found = few(law.candidates, 8, (c) => c.token === law.taken || (hasDraft && drafted.has(c.token)));
  // Two are compared: the largest fills the line.
  const full = hasDraft ? Math.max(...found.flatMap((c) => [c.model_prob, c.draft_prob ?? 0])) : 1;
  return h("section", {}, h("h3", {}, hasDraft ? "Target, and draft (violet), at this place" : "What the target thought at this place"),
    h("div", { class: "rows" }, found.map((c) => h("div", { class: `row ${hasDraft ? "both" : ""} ${c.token === law.taken ? "taken" : ""}` },
      h("span", { class: `name ${drafted.has(c.token) ? "drafted" : ""}` }, shown(c.text)),
      h("span", { class: `bar ${hasDraft ? "two" : ""}` }, h("i", { vars: { "--of": c.model_prob / full } }), hasDraft ? h("i", { vars: { "--of": (c.draft_prob ?? 0) / full } }) : null),
      h("span", {}, percent(c.model_prob), hasDraft ? ` · ${percent(c.draft_prob ?? 0)}` : null)))),
    h("p", { class: "note" }, hasDraft ? "First the model's probability at temperature 1, then the drafter's." : "Probabilities of the model at temperature 1.", " ◦ was in the draft."));
}

function testSection(row, index, law) {
  const why = row.why;
  if (!why) return null;
  if (why.rule !== "target-only") return ratioTest(row);
  if (why.temperature === 0) {
    const best = law?.candidates[0];
    return h("section", {}, h("h3", {}, "The test"), h("p", {}, "At temperature 0 the target takes its likeliest token",
      best ? [", ", quoted(best.text)] : null, ". A drafted token is accepted if it is that one, and only then."));
  }
  return law ? noiseTest(law, why) : null;
}

function noiseTest(law, why) {
  const found = law.candidates.filter((c) => c.noise != null && c.target_prob > 0)
    .map((c) => ({ ...c, sum: Math.log(c.target_prob) + c.noise })).sort((a, b) => b.sum - a.sum).slice(0, 6);
  return h("section", {}, h("h3", {}, "The test"),
    h("p", {}, "Each token has a noise of its own at this position, fixed by the seed. It is added to the logarithm of the token's probability, and the largest sum is what the target draws. A drafted token is accepted if it is that one."),
    h("table", {}, h("thead", {}, h("tr", {}, ["token", "log p", "noise", "sum"].map((t) => h("th", { scope: "col" }, t)))),
      h("tbody", {}, found.map((c) => h("tr", { class: c.token === law.taken ? "taken" : "" },
        h("td", {}, shown(c.text)), h("td", {}, number(Math.log(c.target_prob))), h("td", {}, number(c.noise)), h("td", {}, number(c.sum)))))),
    h("p", { class: "note" }, `Temperature ${number(why.temperature, 1)}, seed ${why.seed}. Plain decoding uses the same noise, so it writes the same text.`));
}

function ratioTest(row) {
  return h("section", {}, h("h3", {}, `The test (${row.why.rule} verification)`),
    h("p", {}, "Longest first: a prefix of the draft is kept if a uniform number falls below its probability."),
    row.why.decisions.map((made) => h("div", { class: `coin ${made.accepted ? "yes" : ""}` },
      h("span", {}, "up to ", quoted(row.draft.texts[made.node]), `: ${number(made.uniform, 3)} ${made.accepted ? "<" : "≥"} ${number(made.probability, 3)}, ${made.accepted ? "accepted" : "refused"}`),
      h("span", { class: "rule" }, h("i", { vars: { "--of": made.probability } }), h("b", { vars: { "--u": made.uniform } })))));
}

function residualSection(row, index, by, law) {
  const isLast = index === row.path.length;
  if (row.why?.residual && isLast) {
    return bars(by === "correction" ? "The residual it was redrawn from" : "What it was drawn from", few(row.why.residual.map((r) => [r.text, r.prob, r.token === row.committed[index].token]), 6, ([, , taken]) => taken),
      "What is left of the target's probability where the draft had claimed too much, made to sum to 1.");
  }
  if (by !== "correction" || !law) return null;
  if (row.why.temperature === 0) {
    return bars("The residual", [[row.committed[index].text, 1, true]], "At temperature 0 the target gives everything to its likeliest token. The draft did not have it, so it takes nothing away: the residual is that token alone.");
  }
  const parent = law.node;
  const drafted = new Set(row.draft.tokens.filter((_, node) => row.draft.parents[node] === parent));
  const claimed = law.candidates.filter((c) => drafted.has(c.token)).reduce((sum, c) => sum + c.target_prob, 0);
  if (claimed >= 1) return null;
  const left = law.candidates.filter((c) => !drafted.has(c.token)).map((c) => [c.text, c.target_prob / (1 - claimed), c.token === law.taken]);
  return bars("The residual", few(left, 6, ([, , taken]) => taken), "The target's distribution without the drafted tokens, made to sum to 1: once the draft was wrong, what replaced it was a draw from this.");
}

// The first few, with those that count in the last places where they are not among them.
function few(found, most, counts) {
  const late = found.slice(most).filter(counts).slice(0, most);
  return [...found.slice(0, most - late.length), ...late];
}

function bars(title, rows, note) {
  return h("section", {}, h("h3", {}, title), h("div", { class: "rows" }, rows.map(([text, prob, taken]) => h("div", { class: `row ${taken ? "taken" : ""}` },
    h("span", { class: "name" }, shown(text)), h("span", { class: "bar" }, h("i", { vars: { "--of": Math.min(1, prob) } })), h("span", {}, percent(prob))))),
    h("p", { class: "note" }, note));
}

function timesSection({ times }) {
  const parts = [["draft", times.draft_ms], ["score", times.score_ms], ["other", times.verify_ms + times.learn_ms]];
  return h("section", {}, h("h3", {}, "This step took"), h("div", { class: "stack" }, parts.map(([name, ms]) => h("i", { class: name, vars: { "--of": ms } }))),
    h("p", { class: "keys" }, parts.map(([name, ms]) => h("span", {}, h("i", { class: name }), `${name === "score" ? "verify" : name} `, h("b", {}, `${number(ms, 1)} ms`)))));
}

document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeWhy(); });
panel.addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by || event.target.closest(".tree-scroll")) return;
  event.preventDefault();
  moveBy(by);
});
