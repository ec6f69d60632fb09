"""What a checkpoint holds and how it is written and read."""
