// What the reader guessed, and what it was: kept in this browser, and held by the address, so that a link shows it.
const KEY = "foredraft-tour";
const told = new Set();
let kept = new Map();

try { kept = new Map(JSON.parse(localStorage.getItem(KEY) ?? "[]")); } catch { /* a browser that keeps nothing */ }

// Guesses that came with the address, by part: those of whoever sent the link.
export const theirs = new Map();
export const listen = (listener) => told.add(listener);
export const guesses = () => [...kept].map(([part, guess]) => ({ part, ...guess }));
export const score = (of = [...kept.values()]) => `${of.filter(({ isNear }) => isNear).length} of ${of.length} guesses were near`;

// The first guess of a part counts: later ones know the answer.
export function note(part, title, [said, found, isNear]) {
  if (kept.has(part)) return;
  kept.set(part, { title, said: String(said), found: String(found), isNear });
  tell();
}

export function forget() { kept.clear(); tell(); }

function tell() {
  try { localStorage.setItem(KEY, JSON.stringify([...kept])); } catch { /* as above */ }
  told.forEach((listener) => listener());
}

// The address of a part with all guesses: "#tour/PART/part:+guess,part:-guess".
export function address(part = "") {
  const all = guesses().map((guess) => `${guess.part}:${guess.isNear ? "+" : "-"}${encodeURIComponent(guess.said)}`);
  return `#tour/${part}/${all.join(",")}`;
}

// The part that an address names; its guesses become `theirs`.
export function read(hash) {
  const [, part = "", said = ""] = hash.split("/");
  theirs.clear();
  for (const each of said.split(",").filter(Boolean)) {
    const [name, guess = ""] = each.split(":");
    try { theirs.set(name, { said: decodeURIComponent(guess.slice(1)), isNear: guess[0] === "+" }); } catch { /* cut by a mailer */ }
  }
  return part;
}
