"""What a run folder shows to people: a page, a trace, a live table. Reads files only; nothing of it runs in a job."""
