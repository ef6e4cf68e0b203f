"""A third-party engine on this machine as a second real reference: llama.cpp on random weights."""
