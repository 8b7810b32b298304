"""Frozen data that everything else speaks in: models, clusters, jobs, plans. No files, no clock, no environment."""
