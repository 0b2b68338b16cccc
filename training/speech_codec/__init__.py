"""The codec of the natural voice: what is said in codes, who says it in voice tokens.

config     the design's sizes; its networks are decoder.codecs.source_filter
pitch      the teacher's pitch, which drives the decoder in training
cost       multiply-adds per second of audio, compared with those of the codec that ships
crops      training examples from the teacher's takes
train      one design on one device, for some minutes
trial      synthesis and several designs at once, on the GPUs that are there
render     clips through a trained codec, and what listeners' models say of them
"""
