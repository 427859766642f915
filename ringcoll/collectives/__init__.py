"""The collectives, one file each, and the way from a public call to a primitive."""
