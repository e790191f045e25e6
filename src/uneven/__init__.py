"""Train language models on hardware that is not uniform."""
