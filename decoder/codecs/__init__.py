"""Audio decoders and encoders, one file or folder per codec."""
