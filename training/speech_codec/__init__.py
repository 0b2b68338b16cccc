"""The codec of the natural voice: what is said in codes, who says it in voice tokens.

config     the design's sizes; its networks are decoder.codecs.source_filter
pitch      the teacher's pitch, which drives the decoder in training
cost       multiply-adds per second of audio, compared with those of the codec that ships
plans      phones, pitch and energy, from which codes are written
coder      codes of plans and voice tokens of styles; train_coder
tokenise   plans to codes and voice tokens for the language model
crops      training examples of the decoder from the teacher's takes
train      one design of the decoder on one device, for some minutes
train_voices  the encoder of voices
clips      sounds and plans of the teacher to judge by
render     clips through a trained codec, and what listeners' models say of them
"""
