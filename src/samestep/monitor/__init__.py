"""What the numbers on the screen and in the ledger mean."""
