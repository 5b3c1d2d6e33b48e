"""Task that predicts whether the frames of a clip are in order or reversed."""
