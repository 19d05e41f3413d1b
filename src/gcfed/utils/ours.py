"""Tells this project's code from the user's and from other packages'."""


def is_ours(module: object) -> bool:
    """Whether a module of this name is one of this project's, such as ``type(net).__module__``."""
    return str(module).split(".")[0] in ("gcfed", "gcfed_sites")
