// Views by the address's hash, light and dark, keys.
import { clear, h } from "./dom.js";
import { info } from "./api.js";
import { setInfo } from "./store.js";
import { closeWhy } from "./why.js";
import { Chat } from "./chat.js";
import { Race } from "./race.js";
import { Dials } from "./dials.js";
import { Tour } from "./tour/tour.js";

const VIEWS = { chat: Chat, race: Race, dials: Dials, tour: Tour };
const made = new Map();
const main = document.getElementById("view");

function go() {
  const name = VIEWS[location.hash.slice(1)] ? location.hash.slice(1) : "chat";
  if (!made.has(name)) made.set(name, new VIEWS[name]());
  const view = made.get(name);
  closeWhy();
  clear(main).append(view.element);
  view.update?.();
  document.querySelectorAll("nav a[data-view]").forEach((a) => (a.dataset.view === name ? a.setAttribute("aria-current", "page") : a.removeAttribute("aria-current")));
  document.title = `foredraft: ${name}`;
  scrollTo(0, 0);
}

function theme() {
  const root = document.documentElement, button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const kept = localStorage.getItem("foredraft-theme");
  if (kept) root.dataset.theme = kept;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("foredraft-theme", root.dataset.theme);
  });
}

async function begin() {
  theme();
  addEventListener("hashchange", go);
  addEventListener("scroll", () => document.querySelector(".top").classList.toggle("scrolled", scrollY > 8), { passive: true });
  addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    const name = Object.keys(VIEWS)[Number(event.key) - 1];
    if (name && !isTyping && !event.metaKey && !event.ctrlKey && !event.altKey) location.hash = name;
  });
  const model = document.getElementById("model");
  try {
    const told = await info();
    setInfo(told);
    model.textContent = [told.model, told.number_format, told.drafter].filter(Boolean).join(" · ");
    model.title = told.cpu;
  } catch (error) {
    model.replaceChildren(h("span", { class: "bad" }, error.message));
  }
  go();
}

begin();
