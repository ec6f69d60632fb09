"""Process group, collectives, gradient exchange. Knows no data."""
