def match(saved, expected, **k): return saved
