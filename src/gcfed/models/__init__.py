"""Networks, each with GC-Fed's borderline in its YAML."""
