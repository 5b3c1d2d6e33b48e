"""Caption metrics: BLEU, ROUGE-L, CIDEr-D, CIDEr; METEOR and SPICE if Java is available."""
