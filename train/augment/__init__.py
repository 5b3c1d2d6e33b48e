"""Model input from YUV planes: colour conversion, augmentation and normalisation, on the device."""
