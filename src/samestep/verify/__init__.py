"""Proof that a training does not depend on the number of ranks, and how far it depends on the precision."""
