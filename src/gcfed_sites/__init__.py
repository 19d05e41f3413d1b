"""Real sites through NVIDIA FLARE (``federation=nvflare``): an optional package, which :mod:`gcfed`
never imports.
"""
