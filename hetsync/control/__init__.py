"""Control: what chooses accumulation steps and delay bound while a job runs, and how it learns to."""
