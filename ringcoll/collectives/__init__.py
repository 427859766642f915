"""The collectives, each in one file, and the way from a public call to a primitive."""
