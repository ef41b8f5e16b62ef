// The guided tour: six parts, each with a picture that follows the scroll, something to run and a question.
import { h } from "../dom.js";
import { slow } from "./slow.js";
import { verify } from "./verify.js";
import { accept } from "./accept.js";
import { exact } from "./exact.js";
import { trees } from "./trees.js";
import { limits } from "./limits.js";

export class Tour {
  constructor() {
    this.parts = [slow(), verify(), accept(), exact(), trees(), limits()];
    this.element = h("div", { class: "tour" },
      h("section", { class: "lead" }, h("h1", {}, "How to write faster without changing a word"),
        h("p", {}, "Speculative decoding in six short parts. What has a green dot really runs, on the model that this server holds.")),
      this.parts.map((part) => part.element),
      h("section", { class: "lead" }, h("h2", {}, "That is all of it."), h("p", {}, "Now ", h("a", { href: "#race" }, "run a race"), ", or ", h("a", { href: "#chat" }, "talk to the model"), " and click any word to see why it is there.")));
  }

  update() { requestAnimationFrame(() => this.parts.forEach((part) => part.update())); }
}
