"""One module per contender. Each has a class `Peer(order)` and, where it needs a file of its own, `prepare(order)`."""
