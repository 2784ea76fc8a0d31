"""Side-by-side figures: attention, training and decoding against dense ones in the same run, and their result files."""
