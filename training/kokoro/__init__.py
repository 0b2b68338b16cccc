"""The natural teacher: Kokoro-82M (Apache-2.0), its weights, phonemes, voices, speech in batches.

packages   what comes from the registries, checked against its hashes
convert    the quantised graph to this package's tensor names
weights    the packed file that holds them
network    text to durations, pitch and samples, in batches
style      voices: rows of style vectors, and mixtures of them
phonemes   text to the teacher's symbols
lines      which lines are spoken, and how they are shared out
studio     sessions of speech: one voice, many lines, two timbres
"""
