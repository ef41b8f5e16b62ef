// The guided tour: each part asks, the reader guesses, and the live model answers.
import { h } from "../dom.js";
import { scoreCard } from "../share.js";
import { getInfo } from "../store.js";
import { accept } from "./accept.js";
import { breakIt } from "./break.js";
import { exact } from "./exact.js";
import { limits } from "./limits.js";
import { load } from "./load.js";
import { much } from "./much.js";
import { noise } from "./noise.js";
import { address, forget, guesses, listen, read, score, theirs } from "./progress.js";
import { slow } from "./slow.js";
import { trees } from "./trees.js";
import { verify } from "./verify.js";
import { yours } from "./yours.js";

export class Tour {
  constructor() {
    const parts = [slow(), verify(), much(), accept(), breakIt(), noise(), exact(), trees(), limits(), load(), yours()];
    parts.forEach((part, i) => part.number(i + 1, parts.length));
    this.scoreAt = h("section", { class: "lead tally" });
    this.sent = h("p", { class: "note" });
    const info = getInfo();
    this.element = h("div", { class: "tour" },
      h("section", { class: "lead" }, h("h1", {}, "How to write faster without changing a word"),
        h("p", {}, `${parts.length} questions about speculative decoding. Guess first; then `, info?.recorded ? ["the model answers, as it did on ", h("b", {}, info.cpu), ", where every step was recorded. "] : "the model that this server holds answers, now and on this machine. ", h("span", { class: "scrub still" }, "Numbers like this"), " can be dragged sideways, or moved with the arrow keys."), this.sent),
      parts.map((part) => part.element), this.scoreAt,
      h("section", { class: "lead" }, h("h2", {}, "That is all of it."), info?.recorded
        ? h("p", {}, "With ", h("span", { class: "mono" }, "foredraft serve"), " the same page runs on your machine: races, chats in which any word says why it is there, and your own prompts.")
        : h("p", {}, "Now ", h("a", { href: "#race" }, "run a race"), ", ", h("a", { href: "#chat" }, "talk to the model"), " and click any word to see why it is there, or ", h("a", { href: "#replay" }, "replay"), " a run step by step.")));
    listen(() => this.#score());
    this.#score();
  }

  // The part that the address names; who came by a link sees what its sender guessed.
  update() {
    const part = read(location.hash);
    this.sent.textContent = theirs.size ? `Whoever sent you this link: ${score([...theirs.values()])}.` : "";
    if (part) requestAnimationFrame(() => document.getElementById(`tour-${part}`)?.scrollIntoView());
  }

  #score() {
    const all = guesses();
    if (!all.length) { this.scoreAt.replaceChildren(); return; }
    const said = h("span", { class: "note", role: "status" });
    const link = () => `${location.href.split("#")[0]}${address()}`;
    const copy = h("button", { class: "button", type: "button", onclick: async () => { try { await navigator.clipboard.writeText(link()); said.textContent = "Copied."; } catch { said.textContent = link(); } } }, "Copy the link");
    this.scoreAt.replaceChildren(h("h2", {}, `${score()}.`), h("div", { class: "line" }, copy, h("button", { class: "chip", type: "button", onclick: forget }, "Begin anew"), said),
      h("details", { class: "show" }, h("summary", {}, "A picture to show to others"), scoreCard(all, score())));
  }
}
