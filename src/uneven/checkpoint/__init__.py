"""Models and training jobs on disk. Import from its modules: some of them load no torch."""
