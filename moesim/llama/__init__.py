"""llama.cpp command lines as scenarios and back, and its benchmark results."""
