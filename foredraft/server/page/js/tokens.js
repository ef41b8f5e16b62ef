// Where the tokens of a text are from, and how that is said.

// Whether a node was copied from earlier text: by its author where a draft has several, else by its drafter.
export const isCopy = (row, node) => (row.draft.authors ? row.draft.authors[node] === "copy" : Boolean(row.copies));

// Who a committed token is from, as class and word: "plain" where nothing had been drafted.
export function origin(row, index) {
  const { by } = row.committed[index];
  if (by === "draft") return { by, author: isCopy(row, row.path[index]) ? "copy" : "head" };
  return { by: row.draft.tokens.length ? by : "plain", author: null };
}

export const MEANING = { draft: "drafted and accepted", copy: "copied from earlier text, and accepted", correction: "a correction", bonus: "a bonus token", plain: "the target's own" };
