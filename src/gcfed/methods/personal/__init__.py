"""What stays on the client."""

#: The result of methods whose clients use their own models.
OWN_MODELS = "personal/local_acc"
