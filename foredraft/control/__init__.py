"""Controllers decide how much to draft, never which tokens, never whether one is accepted."""
