"""From YUV planes to a model's input: colour conversion, augmentation and normalisation, on the device."""
