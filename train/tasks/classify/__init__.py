"""Classification of clips: fine-tuning of a video tower on labelled clips."""
