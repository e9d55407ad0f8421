"""Questions about training and control, each answered once by a table that is published with its date."""
