"""One HTML file that shows one or several runs, from their ledgers."""
