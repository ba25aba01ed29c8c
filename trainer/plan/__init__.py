"""What a training job will cost, computed from the spec alone: pure, and without torch."""
