"""Attention over ranks: the positions that a rank holds, the tiles it computes, and its rounds."""
