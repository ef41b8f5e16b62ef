"""Pure data and maths: no model, no cache, no I/O."""
