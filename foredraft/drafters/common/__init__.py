"""What two or more drafters share; nothing here is a drafter, and nothing serves one alone.

Bookkeeping: `per_request` (a state for each request), `continuing` (going on from a draft),
`draft_cache` (a draft model's cache), `options` (checks). How a draft grows: `chain` and `shapes`
from logits, `best_first` from known probabilities, `price` for how much of it pays, `confidence`
for how far a match is to be trusted, `priors` for what that begins with.
What only one drafter needs lies in its own folder.
"""
