// Views by the address's hash, light and dark, keys.
import { clear, h, sleep } from "./dom.js";
import { info } from "./api.js";
import { getInfo, setInfo } from "./store.js";
import { closeWhy } from "./why.js";
import { Chat } from "./chat.js";
import { Race } from "./race.js";
import { Replay } from "./replay/replay.js";
import { Dials } from "./dials.js";
import { Tour } from "./tour/tour.js";

const VIEWS = { chat: Chat, race: Race, replay: Replay, dials: Dials, tour: Tour };
const made = new Map();
const main = document.getElementById("view");

function go() {
  if (!getInfo()) return;
  const asked = location.hash.slice(1).split("/")[0], name = VIEWS[asked] ? asked : "chat";
  if (!made.has(name)) made.set(name, new VIEWS[name]());
  const view = made.get(name);
  closeWhy();
  clear(main).append(view.element);
  document.querySelectorAll("nav a[data-view]").forEach((a) => (a.dataset.view === name ? a.setAttribute("aria-current", "page") : a.removeAttribute("aria-current")));
  document.title = `foredraft: ${name}`;
  scrollTo(0, 0);
  view.update?.();
}

// A view that is left may take what had the focus along.
function went() {
  go();
  if (document.activeElement === document.body) main.focus({ preventScroll: true });
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
  addEventListener("hashchange", went);
  document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  addEventListener("scroll", () => document.querySelector(".top").classList.toggle("scrolled", scrollY > 8), { passive: true });
  await meet(document.getElementById("model"));
  go();
}

// Who is served here; views are built when that is known. While the model is being loaded, this waits.
async function meet(model) {
  for (;;) {
    try {
      const server = await info();
      setInfo(server);
      model.textContent = [server.model, server.number_format, (server.active ?? [server.drafter]).join(" + ")].filter(Boolean).join(" · ");
      model.title = `foredraft ${server.version} on ${server.cpu}`;
      return;
    } catch (error) {
      const isLoading = error.status === 503;
      model.replaceChildren(h("span", { class: isLoading ? "" : "bad" }, error.message));
      clear(main).append(h("p", { class: "empty", role: "status" }, error.message, isLoading ? " The page goes on by itself." : h("button", { class: "button", type: "button", onclick: () => location.reload() }, "Try again")));
      if (!isLoading) return;
      await sleep(1500);
    }
  }
}

begin();
