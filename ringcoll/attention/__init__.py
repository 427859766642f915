"""Attention over ranks: which positions a rank holds, which tiles it computes, and its rounds."""
