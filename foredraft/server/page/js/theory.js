// Arithmetic of speculative decoding: the textbook's, and the same with measured times.

// Tokens a step commits when K are drafted and each is right with probability a (Leviathan et al., 2211.17192).
export const tokensPerStep = (a, k) => (a >= 1 ? k + 1 : (1 - a ** (k + 1)) / (1 - a));

// The textbook: scoring K+1 tokens costs what scoring one costs, and drafting one costs c of that.
export const textbook = (a, k, c = 0) => tokensPerStep(a, k) / (1 + k * c);

// This machine: scoring costs what was measured, drafting draftMs a step.
export const onMachine = (a, k, curve, draftMs = 0) =>
  (tokensPerStep(a, k) * msOf(curve, 1)) / (msOf(curve, k + 1) + (k ? draftMs : 0));

// Milliseconds of a forward of n tokens, by straight lines through what was measured.
export function msOf(curve, n) {
  const after = curve.findIndex(([size]) => size >= n);
  if (after === 0) return curve[0][1];
  const [[n0, t0], [n1, t1]] = after < 0 ? curve.slice(-2) : [curve[after - 1], curve[after]];
  return t0 + ((n - n0) / (n1 - n0)) * (t1 - t0);
}

export const overlap = (p, q) => p.reduce((sum, x, i) => sum + Math.min(x, q[i]), 0);
export const normalised = (w) => { const sum = w.reduce((a, b) => a + b, 0); return w.map((x) => (sum > 0 ? x / sum : 0)); };
export const residual = (p, q) => normalised(p.map((x, i) => Math.max(0, x - q[i])));

export function draw(p, u = Math.random()) {
  let i = 0;
  for (let sum = p[0]; sum <= u && i < p.length - 1; sum += p[++i]);
  return i;
}

// One token: a draft from q, kept with probability accept(p, q) of its word. A refused one is replaced by a draw from the
// residual; `isForgetful`: from p (a common bug).
export function speculate(p, q, { accept = (pOf, qOf) => pOf / qOf, isForgetful = false } = {}) {
  const x = draw(q);
  if (Math.random() < accept(p[x], q[x])) return { token: x, accepted: true };
  return { token: draw(isForgetful ? p : residual(p, q)), accepted: false };
}
