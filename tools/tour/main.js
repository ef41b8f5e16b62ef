// The tour alone, on recordings. The address holds part and guesses as in the served page, and the model behind a "@".
import { choose, info, names } from "./api.js";
import { choice, clear } from "./dom.js";
import { setInfo } from "./store.js";
import { Tour } from "./tour/tour.js";

const KEY = "foredraft-theme", main = document.getElementById("view");

function theme() {
  const root = document.documentElement;
  root.dataset.theme = localStorage.getItem(KEY) ?? root.dataset.theme ?? "";
  if (!root.dataset.theme) delete root.dataset.theme;
  document.getElementById("theme").addEventListener("click", () => {
    const isDark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem(KEY, root.dataset.theme);
  });
}

async function show(name) {
  choose(name);
  const about = await info();
  setInfo(about);
  const label = document.getElementById("model");
  label.textContent = "";
  if (names.length > 1) label.append(choice("Model", names.map((each) => [each, each]), name, show).element);
  else label.textContent = about.model;
  const tour = new Tour();
  clear(main).append(tour.element);
  tour.update();
  addEventListener("hashchange", () => tour.update());
}

theme();
addEventListener("scroll", () => document.querySelector(".top").classList.toggle("scrolled", scrollY > 8), { passive: true });
show(choose(new URLSearchParams(location.search).get("model") ?? ""));
