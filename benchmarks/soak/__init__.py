"""One long run of random calls and training steps that checks every result, and memory."""
