"""Where ranks are: devices of a topology, meshes whose axes are rings of neighbours, and links."""
