// Dials: what speculation does here, counted over what was run since the page was opened.
import { info } from "./api.js";
import { clear, h, number, percent, slider } from "./dom.js";
import { Frame, ticks } from "./charts.js";
import { all, drafting, getInfo, listen, plainStep, saved, speedup, summary, total } from "./store.js";
import { msOf, onMachine, textbook } from "./theory.js";

const RECENT = 60, FEW = 5;
// Of the time of the recent steps: a smaller loss is not worth an alarm.
const NOISE = 0.02;

export class Dials {
  constructor() {
    this.alarm = h("div", { class: "alarm", role: "alert", hidden: true });
    this.tiles = h("div", { class: "tiles" });
    this.empty = h("p", { class: "empty" }, "Nothing has been run yet. ", h("a", { href: "#chat" }, "Say something"), ", or ", h("a", { href: "#race" }, "start a race"), ".");
    this.k = slider("Draft tokens", { min: 1, max: 16, value: 4, moved: () => this.#curve() });
    this.curveAt = h("div", {});
    this.proofAt = h("section", { class: "tiles" });
    this.element = h("div", { class: "dials" },
      h("section", { class: "lead" }, h("h1", {}, "What speculation does here"), h("p", {}, "Counted over the steps of this tab's chats and races.")),
      this.alarm, this.empty, this.tiles,
      h("section", { class: "tiles" }, h("article", { class: "tile wide" }, h("h2", {}, "Expected speed-up against how often a place is guessed right"),
        h("p", { class: "note" }, "For a draft that is a chain. Dashed: the textbook, where scoring several tokens costs what scoring one does. Solid: the same with the times that this machine took for forwards of several tokens, and with what drafting took. The dot: the measured speed-up of the steps of this tab, when it has seen plain ones."),
        this.k.field, this.curveAt)), this.proofAt);
    this.pending = false;
    listen(() => this.#soon());
    this.#refresh();
  }

  update() {
    this.#refresh();
    info().then(({ proof }) => this.proofAt.replaceChildren(proofTile(proof))).catch(() => {});
  }

  #soon() {
    if (this.pending || !this.element.isConnected) return;
    this.pending = true;
    setTimeout(() => { this.pending = false; this.#refresh(); }, 250);
  }

  #refresh() {
    const steps = all(), figures = summary(steps);
    this.empty.hidden = steps.length > 0;
    clear(this.tiles);
    this.alarm.hidden = true;
    if (steps.length && getInfo()) {
      this.tiles.append(perStep(steps, figures), times(figures), depths(figures), choices(steps, figures), this.#ledger(steps), forwards());
    }
    this.#curve();
  }

  // What the same tokens would have taken one at a time.
  #ledger(steps) {
    const { ms: plainMs, seen } = plainOne();
    // A plain step of another hour says nothing of this one: other work may have come since.
    if (!seen) return tile("Ledger", h("p", { class: "note" }, "What was gained or lost is known when this tab has seen plain steps, too: ", h("a", { href: "#race" }, "a race"), " makes some."), ledgerNote(steps.at(-1).controller));
    let balance = 0;
    const line = steps.map((step, i) => [i + 1, (balance += saved(step, plainMs)) / 1000]);
    const recent = steps.slice(-RECENT);
    const lately = recent.reduce((sum, step) => sum + drafting(step, plainMs), 0);
    const share = lately / recent.reduce((sum, step) => sum + total(step.times), 0);
    if (recent.length >= 12 && share < -NOISE) {
      this.alarm.hidden = false;
      this.alarm.textContent = `Speculation is costing you here: over the last ${recent.length} steps, ${number(-lately / 1000, 2)} s more than plain decoding would have taken.`;
    }
    const values = line.map(([, y]) => y);
    const frame = new Frame(300, 110, [1, Math.max(2, steps.length)], [Math.min(0, ...values), Math.max(0.1, ...values)], `Seconds saved so far: ${number(balance / 1000)}`);
    const isGain = balance >= 0;
    frame.axes(ticks([1, steps.length]), ticks([frame.ys[0], frame.ys[1]].filter((v, i, a) => a.indexOf(v) === i), (v) => number(Math.abs(v) < 0.05 ? 0 : v, 1)), "steps").level(0).line(line, "machine");
    return tile(isGain ? "Ledger: time saved" : "Ledger: time lost", h("p", { class: "big" }, number(Math.abs(balance) / 1000), h("small", {}, isGain ? "s less than plain" : "s more than plain")),
      h("p", { class: "note" }, `Speed-up: ${number(speedup(steps, plainMs))}×, against ${number(plainMs, 1)} ms a plain step, the mean of ${seen} in this tab.`), ledgerNote(steps.at(-1).controller), frame.svg);
  }

  #curve() {
    const info = getInfo();
    if (!info) return;
    const k = this.k.value, steps = all(), figures = summary(steps);
    const draftMs = steps.length ? figures.draftMs / steps.length : 0;
    const points = (f) => Array.from({ length: 50 }, (_, i) => [i / 50, f(i / 50)]);
    const machine = points((a) => onMachine(a, k, info.curve, draftMs));
    const most = Math.min(k + 1, Math.max(2, textbook(0.98, k)));
    const frame = new Frame(innerWidth < 740 ? 330 : 900, 220, [0, 1], [0, most], `Expected speed-up with ${k} draft tokens: where half of the places are guessed right, ${number(textbook(0.5, k))} by the textbook and ${number(onMachine(0.5, k, info.curve, draftMs))} here`);
    frame.axes(ticks([0, 0.25, 0.5, 0.75, 1], percent), ticks([1, Math.round(most / 2), Math.round(most)].filter((v, i, a) => a.indexOf(v) === i), (v) => `${v}×`), "a place is guessed right").level(1)
      .line(points((a) => textbook(a, k)), "book").line(machine, "machine");
    const plain = plainOne();
    if (figures.placesRight != null && plain.seen) {
      const gain = speedup(steps, plain.ms);
      frame.dot(figures.placesRight, Math.min(gain, most), `measured: ${number(gain)}× at ${percent(figures.placesRight)}`);
    }
    const even = machine.find(([, speed]) => speed >= 1);
    clear(this.curveAt).append(frame.svg, h("p", { class: "note" }, even && even[0] > 0 ? `With ${k} draft tokens this machine breaks even where ${percent(even[0])} of places are guessed right.` : even ? `With ${k} draft tokens nearly every guess that is right is gain here.` : `With ${k} draft tokens this machine never gains: scoring them costs too much.`));
  }
}

const plainOne = () => plainStep(msOf(getInfo().curve, 1));

const tile = (title, ...children) => h("article", { class: "tile" }, h("h2", {}, title), children);

function perStep(steps, figures) {
  const recent = steps.slice(-RECENT);
  const most = Math.max(2, ...recent.map((step) => step.row.committed.length));
  const frame = new Frame(300, 70, [0, Math.max(1, recent.length)], [0, most], `Tokens committed in each of the last ${recent.length} steps`);
  recent.forEach((step, i) => frame.bar(i + 0.5, step.row.committed.length, Math.max(2, 240 / recent.length), step.row.num_accepted ? "" : "soft"));
  frame.axes([], ticks([most]), `last ${recent.length} steps`);
  return tile("Committed per step", h("p", { class: "big" }, number(figures.perStep), h("small", {}, "tokens; plain decoding: 1")),
    h("p", { class: "note" }, figures.drafted ? `Acceptance: ${percent(figures.acceptance)} (${figures.accepted} of ${figures.drafted} drafted tokens). A tree offers several tokens for one place, and at most one of them can be right.` : "Nothing has been drafted yet."), frame.svg);
}

function times(figures) {
  const parts = [["draft", "draft", figures.draftMs], ["score", "verify (the target's forward)", figures.scoreMs], ["other", "other", figures.otherMs]];
  const each = (ms) => number(ms / figures.committed, 2);
  return tile("Milliseconds a token", h("p", { class: "big" }, each(figures.draftMs + figures.scoreMs + figures.otherMs), h("small", {}, "ms")),
    h("div", { class: "stack" }, parts.map(([kind, , ms]) => h("i", { class: kind, vars: { "--of": ms } }))),
    h("p", { class: "keys" }, parts.map(([kind, name, ms]) => h("span", {}, h("i", { class: kind }), `${name} `, h("b", {}, each(ms))))),
    h("p", { class: "note" }, `A plain step, which is one token, takes ${number(plainOne().ms, 1)} ms here.`));
}

function depths(figures) {
  const found = figures.places.slice(0, 8);
  const isFew = found.some(({ count }) => count < FEW);
  const frame = new Frame(300, 110, [0, Math.max(4, found.length)], [0, 1], `How often a place is guessed right: ${found.map(({ rate }) => percent(rate)).join(", ")}`);
  found.forEach(({ place, rate, count }) => frame.bar(place - 0.5, rate, 22, count < FEW ? "soft" : "", percent(rate).replace(" %", "")));
  frame.axes(found.map(({ place }) => [place - 0.5, place]), ticks([0.5, 1], percent), "place in the draft");
  return tile("Places guessed right", figures.placesRight == null ? h("p", { class: "note" }, "Nothing has been drafted yet.") : h("p", { class: "big" }, percent(figures.placesRight), h("small", {}, "of places tried")),
    h("p", { class: "note" }, "One of the tokens offered there was right. A place counts once all before it were right.", isFew ? ` Grey: fewer than ${FEW} cases.` : ""), frame.svg);
}

function ledgerNote(plan) {
  if (plan?.balance_ms == null) return null;
  return h("p", { class: "note" }, `The controller may lose ${number(plan.balance_ms, 0)} ms more before it stops drafting.`);
}

function choices(steps, figures) {
  const sizes = steps.map((step) => step.row.draft.tokens.length);
  const most = Math.max(4, ...sizes);
  const counts = Array.from({ length: most + 1 }, (_, n) => sizes.filter((size) => size === n).length);
  const plan = steps.at(-1).controller;
  const frame = new Frame(300, 90, [-0.5, most + 0.5], [0, Math.max(...counts)], "How many steps drafted how many tokens");
  counts.forEach((count, n) => frame.bar(n, count, Math.min(22, 240 / (most + 1)), n ? "" : "soft"));
  frame.axes(ticks([0, Math.round(most / 2), most]), [], "tokens drafted in a step");
  return tile("The controller's choice", h("p", { class: "big" }, number(figures.drafted / steps.length, 1), h("small", {}, `drafted a step`)),
    h("p", { class: "note" }, plan ? [plan.drafter ? `Its plan now: ${plan.drafter}, up to ${plan.budget} tokens.` : "Its plan now: plain decoding, for nothing would pay.", ` ${plan.drafting} of ${plan.steps} steps drafted.`] : "The last step's drafter was chosen by name: it always drafts, and no controller is asked. Choose “as served” to see one at work."), frame.svg);
}

// What the server proved of itself while it was idle.
function proofTile(proof) {
  if (!proof) return tile("Live proof", h("p", { class: "note" }, "Off. With ", h("span", { class: "mono" }, "--prove-every 100"), " the server makes one in a hundred steps that drafted again without drafts, while it is idle, and compares."));
  return tile("Live proof", h("p", { class: "big" }, proof.steps, h("small", {}, proof.steps === 1 ? "step made again without drafts" : "steps made again without drafts")),
    h("p", { class: proof.differences ? "bad" : "note" }, proof.differences ? `${proof.differences} came out otherwise: a fault. The server's log has them; serve without drafts until it is found.` : proof.steps ? "None came out otherwise." : "None yet: it waits until the server is idle.", ` One of ${proof.every} steps that draft is chosen.`));
}

function forwards() {
  const { curve } = getInfo(), one = msOf(curve, 1), eight = msOf(curve, 8);
  const frame = new Frame(300, 90, [0, 17], [0, curve.at(-1)[1] * 1.1], "Milliseconds of a forward by its tokens");
  frame.axes(ticks([1, 8, 17]), ticks([one], (v) => `${number(v, 0)} ms`), "tokens in one forward").line(curve, "machine");
  return tile("A forward of this machine", h("p", { class: "big" }, `${number(eight / one, 2)}×`, h("small", {}, "as long for 8 tokens")),
    h("p", { class: "note" }, "As measured by the server. As long as this is flat, checking guesses costs next to nothing."), frame.svg);
}
