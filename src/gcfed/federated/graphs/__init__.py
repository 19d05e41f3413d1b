"""CUDA graphs and streams: local steps on a GPU, without a launch from Python for each kernel."""
