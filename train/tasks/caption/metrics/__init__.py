"""How good captions are, beside what people said: BLEU, ROUGE-L, CIDEr-D, CIDEr; METEOR and SPICE where they are."""
