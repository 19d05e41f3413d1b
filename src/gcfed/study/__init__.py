"""Many runs from one command: a paper's table (``study=…``), or a search with Optuna (``hparams_search=…``)."""
