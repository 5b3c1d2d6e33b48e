"""Weights from elsewhere, and weights for elsewhere: open_clip, OpenAI, Hugging Face, AVION, LaViLa."""
