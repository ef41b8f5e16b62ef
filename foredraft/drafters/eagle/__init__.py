"""EAGLE: a trained layer on the target's hidden states drafts a tree, token by token."""
