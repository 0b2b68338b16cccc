"""Training of tts/embedded: text, teacher speech, codec, language model, export.

`python -m training.run` runs every stage; each stage is a separate module. tts, llm and decoder
never import this package.
"""
