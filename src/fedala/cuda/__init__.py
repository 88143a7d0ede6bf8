"""What makes lanes fast on a GPU. Models and methods know nothing of it; results are those of the plain path."""
