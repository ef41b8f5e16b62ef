// The guided tour: each part asks, the reader guesses, and the live model answers.
import { h } from "../dom.js";
import { slow } from "./slow.js";
import { verify } from "./verify.js";
import { accept } from "./accept.js";
import { noise } from "./noise.js";
import { exact } from "./exact.js";
import { trees } from "./trees.js";
import { limits } from "./limits.js";
import { yours } from "./yours.js";

export class Tour {
  constructor() {
    const parts = [slow(), verify(), accept(), noise(), exact(), trees(), limits(), yours()];
    parts.forEach((part, i) => part.number(i + 1, parts.length));
    this.element = h("div", { class: "tour" },
      h("section", { class: "lead" }, h("h1", {}, "How to write faster without changing a word"),
        h("p", {}, `Eight questions about speculative decoding. Guess first; then the model that this server holds answers, now and on this machine. `, h("span", { class: "scrub still" }, "Numbers like this"), " can be dragged sideways, or moved with the arrow keys.")),
      parts.map((part) => part.element),
      h("section", { class: "lead" }, h("h2", {}, "That is all of it."), h("p", {}, "Now ", h("a", { href: "#race" }, "run a race"), ", ", h("a", { href: "#chat" }, "talk to the model"), " and click any word to see why it is there, or ", h("a", { href: "#replay" }, "replay"), " a run step by step.")));
  }
}
