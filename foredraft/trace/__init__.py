"""Traces: the steps of a run as lines of JSON, written, read and shown."""
