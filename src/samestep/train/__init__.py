"""The run and its window: one optimizer step."""
