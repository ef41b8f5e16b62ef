"""The loop. It knows targets, drafters and controllers by their protocols only."""
