"""Markup of text: SSML and tags, both read into one `Document`."""
