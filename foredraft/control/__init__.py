"""How much to draft: policies over budgets. Never which tokens, never whether one is accepted."""
