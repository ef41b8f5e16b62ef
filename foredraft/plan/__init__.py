"""Predict the gain of speculation: drafters under loads, on this machine and on others."""
