"""Classification of clips: fine-tuning a video tower on labelled sets."""
