"""Drafters that copy from texts, by token counts or a learnt table: they run no model."""
