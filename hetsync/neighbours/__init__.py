"""Training loops of other libraries on a HetSync job. Each needs its library, and is imported by who uses it."""
