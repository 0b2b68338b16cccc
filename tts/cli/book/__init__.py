"""Long texts: chapters and pieces, a work folder that survives a kill, audio files and playlist."""
