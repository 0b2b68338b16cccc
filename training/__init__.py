"""The recipe that made tts/embedded: text, teacher speech, codec, language model, export.

`python -m training.run` runs every stage; each stage is a module of its own. Nothing in tts, llm
or decoder imports this package.
"""
