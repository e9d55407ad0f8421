"""A whole model at work, on one rank or cut into stages on several."""
