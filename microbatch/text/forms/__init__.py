"""Forms of answers: what is asked for, checked and turned into masks over the vocabulary."""
