// Steps of one request on a line of time.
import { h, number, s, shown } from "../dom.js";
import { total } from "../store.js";
import { origin } from "../tokens.js";

const BOX = 9, GAP = 2, THICK = 22, UNDER = 32, LEAST = 12, STRETCH = 32;

// Consecutive steps with at least so many tokens: which tokens of the reply, their times and counts.
function stretchesOf(steps) {
  const found = [];
  let taken = [], first = 1, count = 0;
  for (const [i, step] of steps.entries()) {
    taken.push(step);
    count += step.row.committed.length;
    if (count < STRETCH && i < steps.length - 1) continue;
    const sum = (of) => taken.reduce((all, { times, row }) => all + of(times, row), 0);
    const draft_ms = sum((t) => t.draft_ms), score_ms = sum((t) => t.score_ms), rest_ms = sum((t) => t.verify_ms + t.learn_ms);
    found.push({ first, last: first + count - 1, steps: taken.length, draft_ms, score_ms, rest_ms, ms_per_token: (draft_ms + score_ms + rest_ms) / count, drafted: sum((_, row) => row.draft.tokens.length), accepted: sum((_, row) => row.num_accepted) });
    first += count;
    taken = [];
    count = 0;
  }
  return found;
}

export class Timeline {
  // `steps`: those of a trace, or of the page. `stretches`: of these, which the line names.
  constructor(steps) {
    this.steps = steps.map((step) => ({ times: step.times, row: step.row ?? step.rows[0] }))
      .filter((step, i) => step.row.committed.length && (steps[i].decoding ?? step.row.num_read === 1));
    this.stretches = stretchesOf(this.steps);
    this.ms = this.steps.reduce((sum, { times }) => sum + total(times), 0);
    this.tokens = this.steps.reduce((sum, { row }) => sum + row.committed.length, 0);
    const middle = [...this.steps.map(({ times }) => total(times))].sort((a, b) => a - b)[this.steps.length >> 1] ?? 1;
    this.scale = 22 / middle;
    this.told = h("p", { class: "step-told", role: "status" });
    const scroll = h("div", { class: "scroll line-of-time", tabindex: 0, role: "group", "aria-label": `${this.steps.length} steps, ${this.tokens} tokens, ${number(this.ms / 1000)} seconds; arrow keys choose a step`, onkeydown: (event) => this.#key(event) }, this.#draw());
    this.element = h("figure", { class: "timeline" }, scroll, h("figcaption", {}, h("p", { class: "keys" }, [["draft", "draft"], ["score", "forward"], ["other", "rest"]].map(([kind, name]) => h("span", {}, h("i", { class: kind }), name)), h("span", {}, `${this.steps.length} steps, ${this.tokens} tokens, ${number(this.ms / 1000)} s`)), this.told));
    this.#pick(this.#slowest(), false);
  }

  #draw() {
    this.groups = [];
    const base = 14 + (BOX + GAP) * Math.max(3, ...this.steps.map(({ row }) => row.committed.length)), height = base + THICK + UNDER;
    const tops = s("g", {}), marks = s("g", {});
    let x = 2, token = 0;
    const starts = new Map();
    for (const [i, { times, row }] of this.steps.entries()) {
      starts.set(token + 1, x);
      const wide = Math.max(LEAST, total(times) * this.scale);
      const group = s("g", { class: "step", onclick: () => this.#pick(i, false) }, s("rect", { class: "hit", x, y: 0, width: wide, height: base + THICK + 4 }));
      let from = x;
      for (const [kind, ms] of [["draft", times.draft_ms], ["score", times.score_ms], ["other", times.verify_ms + times.learn_ms]]) {
        const part = (ms / (total(times) || 1)) * (wide - GAP);
        group.append(s("rect", { class: kind, x: from, y: base, width: Math.max(0, part), height: THICK }));
        from += part;
      }
      row.committed.forEach((_, j) => group.append(s("rect", { class: `by ${origin(row, j).by}`, x, y: base - 6 - (j + 1) * (BOX + GAP), width: Math.min(BOX, wide - GAP), height: BOX, rx: 2 })));
      tops.append(group);
      this.groups.push(group);
      x += wide;
      token += row.committed.length;
    }
    for (const [i, each] of this.stretches.entries()) {
      const from = starts.get(each.first), to = starts.get(this.stretches[i + 1]?.first) ?? x;
      marks.append(s("line", { class: "axis", x1: from, x2: to - 4, y1: base + THICK + 8, y2: base + THICK + 8 }), s("text", { x: from, y: base + THICK + 22 }, `${each.first}–${each.last}`));
    }
    const svg = s("svg", { viewBox: `0 0 ${Math.ceil(x)} ${height}`, width: Math.ceil(x), height, "aria-hidden": "true" }, tops, marks);
    return svg;
  }

  #slowest() {
    const each = ({ times, row }) => total(times) / row.committed.length;
    return this.steps.reduce((worst, step, i) => (each(step) > each(this.steps[worst]) ? i : worst), 0);
  }

  #pick(i, isSeen) {
    const step = this.steps[i];
    if (!step) return;
    this.groups[this.at]?.classList.remove("picked");
    this.at = i;
    this.groups[i].classList.add("picked");
    const { times, row } = step, drafted = row.draft.tokens.length;
    this.told.replaceChildren(h("b", {}, `Step ${i + 1}`), `: ${drafted ? `${drafted} drafted${row.drafter ? ` by ${row.drafter.replaceAll("_", " ")}` : ""}, ${row.num_accepted} stood` : "nothing drafted"}; ${number(total(times), 1)} ms, of which draft ${number(times.draft_ms, 1)}, forward ${number(times.score_ms, 1)}. `, h("span", { class: "soft" }, `“${row.committed.map((each) => shown(each.text)).join("")}”`));
    if (isSeen) { const box = this.groups[i].getBoundingClientRect(), around = this.element.querySelector(".scroll"); around.scrollLeft += box.left - around.getBoundingClientRect().left - around.clientWidth / 2; }
  }

  #key(event) {
    const to = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: this.steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#pick(Math.max(0, Math.min(this.steps.length - 1, to)), true);
  }
}
