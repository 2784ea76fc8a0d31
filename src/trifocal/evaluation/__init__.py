"""What a trained model can do: loss by position, its choice, needles, recall, a grade (`trifocal evaluate`)."""
