def optimizer_from_names(o, n, s): pass
def optimizer_to_names(o, n): return {}
