"""Executable claims: a paper's central claim against its baseline, with a computed verdict."""
