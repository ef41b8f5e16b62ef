"""What any part may need of the machine and its files; knows nothing of models."""
