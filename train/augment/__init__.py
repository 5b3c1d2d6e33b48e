"""Conversion of YUV planes to model input on the device: colour conversion, augmentation and normalisation."""
