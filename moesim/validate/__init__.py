"""Real runs against their simulation: how true a prediction is on this machine."""
