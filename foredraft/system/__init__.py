"""Helpers for the machine and its files. They know nothing of models."""
