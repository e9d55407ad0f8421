"""A whole model at work, on one rank or cut into stages on several: one member of a delayed synchronisation."""
