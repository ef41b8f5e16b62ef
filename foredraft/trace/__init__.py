"""What happened, step by step, as lines of JSON: written, read, shown and replayed."""
