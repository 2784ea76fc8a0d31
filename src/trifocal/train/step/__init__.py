"""One optimizer step: micro-batches, recorded graphs, optimizer and schedule."""
