"""Autocast policy and the loss scale."""
