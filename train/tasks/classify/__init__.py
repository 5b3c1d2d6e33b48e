"""Classification of clips: fine-tune a video tower on a labelled dataset."""
