"""Training of tts/embedded: text, teacher speech, codec, language model, export.

`training/NOTES.md` lists the stages; each is a separate module. tts, llm and decoder never import
this package.
"""
