"""Which samples a window sees: order, grid, loader. Knows no ranks."""
