"""Training of drafters: texts, captured states, losses, and the loop over them."""
