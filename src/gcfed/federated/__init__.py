"""A round on one machine: the loop, messages, stacks of clients, local training, stores."""
