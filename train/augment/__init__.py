"""From a batch's planes to what a model takes: colour, flip, jitter, blur and normalisation, on the device."""
