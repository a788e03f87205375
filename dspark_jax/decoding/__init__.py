"""Decoding: sampling, verification and generation."""
