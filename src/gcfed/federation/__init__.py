"""The same rounds over other transports than one simulation's memory."""
