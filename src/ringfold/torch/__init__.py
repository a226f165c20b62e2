"""PyTorch: what a program with a model, an optimizer and a loader needs."""
