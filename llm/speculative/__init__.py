"""Speculative decoding: a draft model drafts tokens, one forward of the target model verifies
them.
"""
