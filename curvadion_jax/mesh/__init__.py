"""Where replicas are: rows of a mesh, what replicas do together, and devices of one."""
