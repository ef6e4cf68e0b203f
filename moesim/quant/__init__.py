"""Expert weights in the layouts of real kernels."""
