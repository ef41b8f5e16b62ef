// A text that shows how it was made: guesses ahead of the cursor that turn solid or are struck out.
import { announce, h, shown, sleep } from "./dom.js";
import { total } from "./store.js";
import { MEANING, origin } from "./tokens.js";
import { focusWhy, openWhy } from "./why.js";

export const PACES = [["real", "1×"], ["slow", "slow"], ["step", "step"]];
const SLOW = 15;
// What stands for a shorter time would only flicker.
const SEEN_MS = 24, SEEN_CALMLY_MS = 200;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// The nodes to show ahead of the cursor: what was accepted, then the likeliest of what hangs below it.
export function spine(row) {
  const nodes = [...row.path];
  for (let at = nodes.at(-1) ?? -1; ;) {
    const next = row.draft.parents.findIndex((parent) => parent === at);
    if (next < 0) return nodes;
    nodes.push(next);
    at = next;
  }
}

export class MadeText {
  constructor({ label, why = true } = {}) {
    this.steps = [];
    this.tokens = [];
    this.picked = -1;
    this.ghost = h("span", { class: "ghost", "aria-hidden": "true" });
    this.cursor = h("span", { class: "cursor", "aria-hidden": "true" });
    this.element = h("div", { class: "made", tabindex: 0, role: "group", "aria-label": label ?? "Text; arrow keys choose a token, Enter asks why" }, this.ghost, this.cursor);
    if (!why) return;
    this.element.addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (token) this.pick(this.tokens.indexOf(token), true);
    });
    this.element.addEventListener("keydown", (event) => this.#key(event));
  }

  // Show a step: for `ms` milliseconds in all, the guess first and then what became of it.
  async play(event, ms) {
    const { row } = event;
    if (!row.committed.length) return;
    const nodes = spine(row);
    if (nodes.length && ms >= (calm.matches ? SEEN_CALMLY_MS : SEEN_MS)) {
      const guesses = nodes.map((node) => h("span", {}, row.draft.texts[node]));
      this.ghost.replaceChildren(...guesses);
      this.onAdd?.();
      await sleep(ms * 0.45);
      guesses.forEach((guess, i) => guess.classList.add(i < row.num_accepted ? "yes" : "no"));
      await sleep(ms * 0.35);
      this.ghost.replaceChildren();
      this.add(event);
      await sleep(ms * 0.2);
    } else {
      this.ghost.replaceChildren();
      this.add(event);
      await sleep(ms);
    }
  }

  // Show a step's tokens at once.
  add(event) {
    const step = this.steps.push(event) - 1;
    event.row.committed.forEach((committed, index) => {
      const { by, author } = origin(event.row, index);
      const token = h("span", { class: "token new", "data-by": by, "data-author": author, "data-blank": !committed.text.trim(), "data-step": step, "data-index": index }, committed.text);
      this.tokens.push(token);
      this.ghost.before(token);
    });
    this.onAdd?.();
  }

  end() { this.ghost.replaceChildren(); this.cursor.remove(); }

  pick(index, open) {
    if (index < 0 || index >= this.tokens.length) return;
    document.querySelectorAll(".token.picked").forEach((old) => old.classList.remove("picked"));
    const token = this.tokens[index];
    token.classList.add("picked");
    this.picked = index;
    announce(`${shown(token.textContent)}: ${MEANING[token.dataset.author === "copy" ? "copy" : token.dataset.by]}`);
    const isOpen = document.body.classList.contains("asking");
    if (open || isOpen) {
      openWhy(this.steps[token.dataset.step], Number(token.dataset.index), {
        step: Number(token.dataset.step) + 1,
        move: (by) => this.pick(this.picked + by, true),
      });
    }
    token.scrollIntoView({ block: "nearest" });
  }

  #key(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by) this.pick(this.picked < 0 ? (by > 0 ? 0 : this.tokens.length - 1) : this.picked + by, false);
    else if (event.key === "Enter") { this.pick(Math.max(0, this.picked), true); focusWhy(); }
    else return;
    event.preventDefault();
  }
}

// Plays events at a pace of the reader's: as they were, slowed down, or one at a time.
export class Player {
  constructor(text, pace) {
    this.text = text;
    this.pace = pace;
    this.queue = [];
    this.next = null;
    this.woken = null;
  }

  push(event) { this.queue.push(event); this.woken?.(); }
  // Nothing more comes. What is queued is still shown, and at the reader's pace.
  finish() { this.done = true; this.woken?.(); }
  // Shows no more than is there already.
  stop() { this.queue.length = 0; this.isStopped = true; this.finish(); this.next?.(); }
  step() { this.next?.(); }

  async run() {
    for (;;) {
      if (!this.queue.length) {
        if (this.done) break;
        await new Promise((resolve) => { this.woken = resolve; });
        continue;
      }
      const event = this.queue.shift();
      const pace = this.pace();
      if (pace === "step" && event.row.committed.length) {
        this.waiting?.(true);
        await new Promise((resolve) => { this.next = resolve; });
        this.next = null;
        this.waiting?.(false);
        if (this.isStopped) break;
      }
      const ms = total(event.times);
      // A backlog at real pace is caught up with, so that the page never lags behind the model.
      await this.text.play(event, pace === "real" ? (this.queue.length > 2 ? 0 : Math.min(ms, 60)) : Math.max(240, Math.min(ms * SLOW, 700)));
    }
    this.text.end();
  }
}

export function legend() {
  const item = (by, author, text, title) => h("span", { title }, h("span", { class: "token", "data-by": by, "data-author": author }, text));
  return h("p", { class: "legend" }, h("span", { class: "unseen" }, "What the underlines mean: "),
    item("draft", "head", "drafted", "A guess of the drafter's that the model agreed with"),
    item("draft", "copy", "copied from earlier text", "A guess too, copied from what followed the same words before"),
    item("correction", null, "corrected", "The guess was wrong; this is the model's own token"),
    item("bonus", null, "bonus", "All guesses were right, and the same forward brought one token more"),
    item("plain", null, "not drafted", "Nothing had been guessed here"));
}
