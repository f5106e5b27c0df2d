"""Training state: as plain tensors by parameter name, and sharded over processes."""
