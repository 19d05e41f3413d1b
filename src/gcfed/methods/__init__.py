"""One small file a method, each a client part, a server part, or both."""
