"""Stalls: seen by a watchdog, said in words, dumped with the stacks of all threads."""
