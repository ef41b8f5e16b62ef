// What the tour asks the model: JSON behind the first equals sign, so that `make tour` can ask the same beforehand.
// A drafter is the first of its names that can be had; "recorded" are the values that the static edition knows.
export const ASKED = {
  "likeliest": {
    "messages": [{ "role": "user", "content": "Tell me a story about a mill." }],
    "begin": "The old mill stood by the", "lanes": [{ "drafter": ["none"] }], "max_tokens": 1, "shows_why": true
  },
  "law": {
    "messages": [{ "role": "user", "content": "Tell me a story about a mill." }],
    "begin": "The old mill stood by the", "lanes": [{ "drafter": ["none"] }], "max_tokens": 1,
    "temperature": 0.8, "seed": 8, "shows_why": true,
    "recorded": { "temperature": [0.2, 0.4, 0.6, 0.8, 1, 1.2], "seed": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] }
  },
  "draft": {
    "messages": [{ "role": "user", "content": "Tell me a story about a mill." }],
    "begin": "The old mill stood by", "lanes": [{ "drafter": ["blend", "hidden_head", "self_draft", "draft_model", "suffix"] }],
    "max_tokens": 4, "coupling": "drawn", "temperature": 0.8, "seed": 0, "shows_why": true,
    "recorded": { "temperature": [0.2, 0.4, 0.6, 0.8, 1, 1.2], "seed": [0, 1, 2] }
  },
  "verify": {
    "messages": [{ "role": "user", "content": "Rename the variable total to result and keep everything else:\n\ndef mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)" }],
    "lanes": [{ "drafter": ["served"], "num_draft_tokens": 4 }], "max_tokens": 64, "shows_why": true,
    "recorded": { "num_draft_tokens": [0, 1, 2, 3, 4, 6, 8, 12, 16] }
  },
  "much": {
    "messages": [{ "role": "user", "content": "Tell me a short story about a lighthouse keeper." }],
    "lanes": [{ "drafter": ["draft_model", "blend", "served"], "num_draft_tokens": 4 }], "max_tokens": 96,
    "recorded": { "num_draft_tokens": [1, 2, 4, 8] }
  },
  "exact": {
    "messages": [{ "role": "user", "content": "Write two sentences about a lighthouse." }],
    "lanes": [{ "drafter": ["none"] }, { "drafter": ["token_recycling", "ngram", "suffix"] }, { "drafter": ["served"] }],
    "max_tokens": 48, "temperature": 0.7, "seed": 7,
    "recorded": { "temperature": [0, 0.7, 1.2], "seed": [7, 8, 9] }
  },
  "trees": {
    "messages": [{ "role": "user", "content": "Summarise in two sentences, in the words of the text: The old mill stands by the river where the road bends. For two hundred years the mill ground the grain of the valley. When the railway came, grain went to the city, and the mill stood still. Now the old mill by the river is a museum." }],
    "lanes": [{ "drafter": ["blend", "token_recycling", "served"] }], "max_tokens": 64
  },
  "limits": {
    "messages": [{ "role": "user", "content": "Invent ten unusual names for a ship." }],
    "lanes": [{ "drafter": ["none"] }, { "drafter": ["lookahead", "token_recycling", "ngram"], "num_draft_tokens": 16 }, {}],
    "max_tokens": 64, "temperature": 1.2, "seed": 3,
    "recorded": { "num_draft_tokens": [4, 16], "temperature": [0, 1.2] }
  },
  "yours": {
    "lanes": [{ "drafter": ["none"] }, {}], "max_tokens": 120, "shows_why": true,
    "recorded": { "prompt": [
      "Name the months of the year and the number of days that each has.",
      "Correct the spelling and change nothing else: The old mill stands by the rivver. Every morning she opens the mill, sweeps the floor of the mill and sells flour to the town.",
      "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
      "Explain to a child why the sky is blue."
    ] }
  }
};
