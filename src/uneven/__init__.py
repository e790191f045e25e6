"""Train and serve language models on hardware that is not uniform."""
