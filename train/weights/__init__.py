"""Weights from elsewhere, and for elsewhere: open_clip, OpenAI, Hugging Face, AVION, LaViLa, VideoMAE."""
