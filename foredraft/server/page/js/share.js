// A picture of a race to show to others: two bars, two equal hashes, and where it was.
import { h, number } from "./dom.js";
import { getInfo } from "./store.js";

const WIDTH = 1200, HEIGHT = 630, LEFT = 80;

// The picture of a race with its buttons. `race`: both ends, the speed-up, the prompt and the temperature.
export const sharing = (race) => card(words(race), (ctx) => paint(ctx, race));

// The picture of a tour: the score, and each guess beside what it was.
export const scoreCard = (guesses, score) => card(`${score}. ${where()}.`, (ctx) => {
  const { say } = ground(ctx);
  say(score, LEFT, 190, "#0b7a6f", 62, 700);
  guesses.slice(0, 11).forEach(({ title, said, found, isNear }, i) => say(`${isNear ? "✓" : "·"}  ${title} I said ${said}: it is ${found}.`, LEFT, 246 + i * 29, isNear ? "#1d1c1a" : "#6a655d", 20));
  say(where(), LEFT, 596, "#1d1c1a", 22);
});

function card(label, painted) {
  const canvas = h("canvas", { width: WIDTH, height: HEIGHT, class: "card", role: "img", "aria-label": label });
  painted(canvas.getContext("2d"));
  const blob = () => new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  const said = h("span", { class: "note", role: "status" });
  const buttons = [h("button", { class: "button", type: "button", onclick: async () => save(await blob()) }, "Save the picture")];
  const copies = navigator.clipboard && typeof ClipboardItem !== "undefined";
  if (copies) buttons.push(h("button", { class: "button", type: "button", onclick: async () => {
    try { await navigator.clipboard.write([new ClipboardItem({ "image/png": blob() })]); said.textContent = "Copied."; } catch { said.textContent = "The browser does not let the page copy pictures."; }
  } }, "Copy it"));
  return h("figure", { class: "sharing" }, canvas, h("figcaption", { class: "line" }, buttons, said));
}

function save(blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: "foredraft.png" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

const isSame = ({ plain, fast }) => plain.sha256 === fast.sha256;
const headline = ({ speedup }) => (speedup >= 1.005 ? `${number(speedup, 2)}× as fast` : `${number(speedup, 2)}× the speed`);
const where = () => { const info = getInfo(); return info ? [info.model, info.number_format, `on ${info.cpu}`].filter(Boolean).join(", ") : ""; };

function words(race) {
  return `${headline(race)}: ${number(race.fast.tokens_per_s, 1)} against ${number(race.plain.tokens_per_s, 1)} tokens a second. ${isSame(race) ? "The same text, byte for byte" : "The texts differ"}. ${where()}.`;
}

// Light, whatever the page is: pictures are looked at elsewhere. Returns what writes on it.
function ground(ctx) {
  const font = (size, weight = 500) => { ctx.font = `${weight} ${size}px Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`; };
  const say = (text, x, y, colour, size, weight, most = WIDTH - 2 * LEFT) => { font(size, weight); ctx.fillStyle = colour; ctx.fillText(cut(ctx, text, most), x, y); };
  ctx.fillStyle = "#fcfbf8";
  ctx.fillRect(0, 0, WIDTH, HEIGHT);
  mark(ctx, LEFT, 72);
  say("foredraft", LEFT + 62, 84, "#1d1c1a", 30, 660);
  return { say };
}

function paint(ctx, race) {
  const { say } = ground(ctx);
  say(headline(race), LEFT, 196, "#0b7a6f", 84, 700);
  say(isSame(race) ? "and the same text, byte for byte" : "and the texts differ", LEFT, 246, isSame(race) ? "#1d1c1a" : "#b3261e", 34, 540);
  const pair = [["plain", race.plain, "#8c867b"], ["with drafts", race.fast, "#0b7a6f"]];
  const full = Math.max(...pair.map(([, end]) => end.tokens_per_s));
  pair.forEach(([name, end, colour], i) => {
    const y = 300 + i * 78, wide = full ? (560 * end.tokens_per_s) / full : 0;
    say(name, LEFT, y + 34, "#6a655d", 26, 500, 190);
    ctx.fillStyle = colour;
    ctx.beginPath();
    ctx.roundRect(LEFT + 200, y, Math.max(6, wide), 48, 10);
    ctx.fill();
    say(`${number(end.tokens_per_s, 1)} tokens/s`, LEFT + 220 + wide, y + 34, "#1d1c1a", 26, 560, 240);
  });
  say(`SHA-256 ${race.plain.sha256.slice(0, 32)}…`, LEFT, 484, "#6a655d", 22);
  say(`${isSame(race) ? "=" : "≠"} SHA-256 ${race.fast.sha256.slice(0, 32)}…`, LEFT, 516, "#6a655d", 22);
  say(where(), LEFT, 562, "#1d1c1a", 22);
  say(`temperature ${number(race.temperature, 1)}, ${race.fast.num_tokens} tokens: “${race.prompt.replace(/\s+/g, " ")}”`, LEFT, 594, "#6a655d", 20);
}

function mark(ctx, x, y) {
  ctx.strokeStyle = "#0b7a6f";
  ctx.lineWidth = 9;
  ctx.lineCap = "round";
  for (const [from, to, alpha] of [[0, 16, 1], [27, 36, 0.6], [47, 49, 0.3]]) {
    ctx.globalAlpha = alpha;
    ctx.beginPath();
    ctx.moveTo(x + from, y);
    ctx.lineTo(x + to, y);
    ctx.stroke();
  }
  ctx.globalAlpha = 1;
}

// As much of a text as fits.
function cut(ctx, text, most) {
  if (ctx.measureText(text).width <= most) return text;
  let end = text.length;
  while (end > 1 && ctx.measureText(`${text.slice(0, end)}…`).width > most) end -= 1;
  return `${text.slice(0, end)}…`;
}
