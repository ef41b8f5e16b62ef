"""Rules of a request for the distribution at one position, given the text before it.

One object owns it: verification asks it for the law at each node it reaches, and a drafter's
distribution goes through it before anything is drawn or chosen. So a rule that looks at the text
(a penalty, a ban, a grammar) sees on every path of a tree what plain decoding would see there.

================  ==============================================================================
`base`            the seam
`bans`            allowed tokens, bad words, min_tokens
`penalties`       repetition, frequency and presence; logit_bias
`grammar`         tokens that a grammar allows, along committed and drafted tokens
`row`             all of them together, in their order
`book`            from a request to its rules, and its refusals
================  ==============================================================================
"""

from foredraft.core.rules.base import Rules

__all__ = ["Rules"]
