"""Recurrences, maths only: no model, no cache."""
