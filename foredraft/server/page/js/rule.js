// An acceptance rule as people type it: p, q, numbers, + - * / and a few functions. Nothing is evaluated as a script.
const CALLS = { min: Math.min, max: Math.max, sqrt: Math.sqrt, exp: Math.exp, log: Math.log, abs: Math.abs };
const SUMS = { "+": (a, b) => a + b, "-": (a, b) => a - b };
const PRODUCTS = { "*": (a, b) => a * b, "/": (a, b) => a / b };

// The rule as a function of p and q whose values lie between 0 and 1; an error in words where it cannot be read.
export function rule(text) {
  const tokens = text.match(/\d*\.?\d+|[a-z]+|\S/gi) ?? [];
  let at = 0;
  const take = (what) => tokens[at] === what && ++at;
  const need = (what) => { if (!take(what)) throw new Error(at < tokens.length ? `“${tokens[at]}” stands where “${what}” is wanted.` : `“${what}” is missing at the end.`); };
  const chain = (next, operators) => () => {
    let left = next();
    while (Object.hasOwn(operators, tokens[at])) {
      const a = left, f = operators[tokens[at++]], b = next();
      left = (p, q) => f(a(p, q), b(p, q));
    }
    return left;
  };
  const sum = () => whole();
  function atom() {
    if (take("-")) { const f = atom(); return (p, q) => -f(p, q); }
    if (take("(")) { const f = sum(); need(")"); return f; }
    const word = tokens[at++];
    if (/^[\d.]/.test(word ?? "")) return () => Number(word);
    if (word === "p") return (p) => p;
    if (word === "q") return (_, q) => q;
    if (!Object.hasOwn(CALLS, word)) throw new Error(word === undefined ? "Something is missing at the end." : `“${word}” is neither p, q, a number, nor one of ${Object.keys(CALLS).join(", ")}.`);
    need("(");
    const inner = [sum()];
    while (take(",")) inner.push(sum());
    need(")");
    return (p, q) => CALLS[word](...inner.map((f) => f(p, q)));
  }
  const whole = chain(chain(atom, PRODUCTS), SUMS), found = sum();
  if (at < tokens.length) throw new Error(`“${tokens[at]}” is one too many.`);
  return (p, q) => { const x = found(p, q); return Number.isNaN(x) ? 0 : Math.max(0, Math.min(1, x)); };
}
