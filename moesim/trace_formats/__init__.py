"""Readers of other tools' routing traces, one family a module; ``moesim.trace_files`` chooses among them."""
