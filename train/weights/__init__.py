"""Weights from and for other projects: open_clip, OpenAI, Hugging Face, AVION, LaViLa, VideoMAE."""
