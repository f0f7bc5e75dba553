"""The workshop: data from a target's own answers, drafters trained on it, and their evaluation."""
