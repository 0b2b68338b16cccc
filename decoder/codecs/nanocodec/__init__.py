"""NVIDIA's NanoCodec, the codec of Kani-TTS."""
